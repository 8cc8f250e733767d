"""The terms of a call, which all ranks must have in common, and what is refused of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.plan.layout import Layout, check_tokens

_WHO = "burst attention"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks must have in common; the same terms make the same call."""

    shapes: tuple[torch.Size, ...]  # of q, k and v, like the next two
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    current_device: int | None  # None on CPU
    gradients: bool
    causal: bool
    softmax_scale: float
    layout: str
    qkv_format: str
    config: BurstConfig

    def in_words(self) -> dict[str, str]:
        """By name; of devices only what must not differ between ranks."""
        words = {name: str(tuple(shape)) for name, shape in zip("qkv", self.shapes, strict=True)}
        words["dtype"] = ", ".join(map(str, self.dtypes))
        words["device"] = ", ".join(
            device.type + (" (not the current device)" if self.is_elsewhere(device) else "")
            for device in self.devices
        )
        for name in ("gradients", "causal", "softmax_scale", "layout", "qkv_format", "config"):
            words[name] = str(getattr(self, name))
        return words

    def is_elsewhere(self, device: torch.device) -> bool:
        """Whether a device is a GPU, but not the process's current one."""
        return device.type == "cuda" and device.index != self.current_device


def terms_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, qkv_format: str,
    config: BurstConfig,
) -> Terms:  # fmt: skip
    """The terms of a call with these tensors."""
    tensors = (q, k, v)
    return Terms(
        shapes=tuple(x.shape for x in tensors),
        dtypes=tuple(x.dtype for x in tensors),
        devices=tuple(x.device for x in tensors),
        current_device=torch.cuda.current_device() if any(x.is_cuda for x in tensors) else None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        causal=causal,
        softmax_scale=scale,
        layout=layout,
        qkv_format=qkv_format,
        config=config,
    )


def check(terms: Terms, cp_size: int) -> None:
    """Refuse what does not fit; all ranks have the same terms by now.

    Raises:
        BurstError: in one sentence.
    """
    (q, k, v), dtypes, devices = terms.shapes, terms.dtypes, terms.devices
    qkv_format, layout, scale = terms.qkv_format, terms.layout, terms.softmax_scale
    if qkv_format not in ("bshd", "sbhd"):
        raise BurstError(
            f"{_WHO}: qkv_format must be bshd or sbhd, because it names the order of the axes; got "
            f"{qkv_format!r}; pass one of these"
        )
    if layout not in tuple(Layout):
        raise BurstError(
            f"{_WHO}: layout must be one of {', '.join(Layout)}, because it decides which keys a "
            f"query may see; got {layout!r}; pass the one in which the tokens are dealt out"
        )
    shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if any(len(shape) != 4 for shape in (q, k, v)):
        raise BurstError(
            f"{_WHO}: q, k and v must have four axes ({qkv_format}), because heads and batch are "
            f"separate; got {shapes}; reshape them"
        )
    if q[:2] != k[:2] or k[:3] != v[:3] or q[3] != k[3]:
        raise BurstError(
            f"{_WHO}: q, k and v must agree in batch and tokens, k and v in heads, q and k in head "
            f"dimension, because this is self-attention; got {shapes}; pass matching shards"
        )
    if 0 in (*q, *v) or q[2] % k[2]:
        raise BurstError(
            f"{_WHO}: the number of key heads must divide that of query heads and no axis may be "
            f"empty, because each key head serves equally many query heads; got {shapes}; change "
            "the heads (--num-query-groups) or the batch"
        )
    if dtypes[0] not in _DTYPES or len(set(dtypes)) > 1:
        raise BurstError(
            f"{_WHO}: q, k and v must have one dtype among float64, float32, bfloat16 and float16, "
            f"because nothing is converted silently; got {', '.join(map(str, dtypes))}; cast them"
        )
    if len(set(devices)) > 1:
        raise BurstError(
            f"{_WHO}: q, k and v must be on one device, because one kernel reads them; got "
            f"{', '.join(map(str, devices))}; move them"
        )
    if terms.is_elsewhere(devices[0]):
        raise BurstError(
            f"{_WHO}: q, k and v must be on the process's current device, because streams and "
            f"transfers belong to it; got {devices[0]} while cuda:{terms.current_device} is "
            "current; call torch.cuda.set_device(LOCAL_RANK) first"
        )
    if not 0 < scale < float("inf"):
        raise BurstError(
            f"{_WHO}: softmax_scale must be positive and finite, because kernels look for the "
            f"largest score before they scale it; got {scale}; leave it out for d ** -0.5"
        )
    check_tokens(Layout(layout), cp_size, q[0 if qkv_format == "sbhd" else 1])
