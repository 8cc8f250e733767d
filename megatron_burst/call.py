"""A call: what must be the same on all ranks."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_burst.arguments import KINDS, CallArgs, is_dense, is_sink, short_repr, window_of
from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import choose_backend, pick
from megatron_burst.kernels.interface import SOFTCAP, Problem, arch_of, multiprocessors
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import SLICES, Mask
from megatron_burst.schedule.spec import AttentionShape, Circulate, Kernel, Spec
from megatron_burst.schedule.topology import Topology
from megatron_burst.version import __version__

_USUAL = bool, bool, int, BurstConfig


@dataclass(frozen=True, slots=True)
class Call:
    """What must be the same on all ranks; equal calls run alike."""

    shapes: tuple[tuple, ...]  # of q, k and v, like the next two; a batch axis of 1 in "thd"
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    current_device: int | None  # None on CPU
    gradients: bool
    sink: tuple  # shape, dtype, device and whether it needs a gradient; () without
    causal: bool
    window: tuple[int | None, int | None]
    sample_args: tuple[str, ...]
    softmax_scale: float
    softcap: float
    layout: str
    qkv_format: str
    return_max_logit: bool
    config: BurstConfig
    wrong_kinds: tuple[tuple[str, str], ...]  # arguments of another kind, and what they are

    @property
    def packed(self) -> bool:
        """Whether the sequence is a packed sample."""
        return "cu_seqlens" in self.sample_args

    @property
    def sliced(self) -> bool:
        """Whether slices say what a query sees; a tree becomes slices."""
        return "slices" in self.sample_args or "prefix_tree" in self.sample_args

    @property
    def mask(self) -> Mask:
        """What the program knows of which keys a query sees: a band of positions. The sample, with
        its documents or slices, says the rest when the call runs."""
        if self.sliced:
            in_order = self.causal and self.layout != Layout.DOCUMENTS
            return Mask(None, 0 if in_order else None, True)
        return Mask(*self.window, self.packed)

    @property
    def shape(self) -> AttentionShape:
        """Sizes on one rank; gradients between ranks as wide as sums."""
        shapes = self.shapes
        if self.qkv_format == "sbhd":
            shapes = tuple((batch, tokens, *sizes) for tokens, batch, *sizes in shapes)
        return attention_shape(shapes, self.dtypes[0])

    @property
    def problem(self) -> Problem:
        """What a kernel must support."""
        shape, mask, device = self.shape, self.mask, self.devices[0]
        needs = frozenset({SLICES}) if self.sliced else mask.needs
        return Problem(
            device.type, self.dtypes[0], shape.dim_qk, shape.dim_v,
            shape.heads_q != shape.heads_kv, self.config.reproducible, arch_of(device),
            needs | ({SOFTCAP} if self.softcap else set()), self.config.invariant,
            shape.exceeds_int32,
        )  # fmt: skip

    def facts(self) -> dict[str, str]:
        """Facts of this rank's machine that decide how the call runs, by name; ranks with equal
        facts choose alike, whatever the batch and tokens."""
        config, device = self.config, self.devices[0]
        facts = {"version": f"{__version__} with torch {torch.__version__}"}
        try:
            facts["backend"] = choose_backend(self.problem, config.backend)[0].capability.name
        except BurstError as error:
            facts["backend"] = str(error)  # the other ranks must learn that too
        facts["backend of huge outputs"] = pick(replace(self.problem, huge=True), config.backend)
        force = config.force
        in_rounds = config.intra != "ring" and not force.flat and force.pieces
        if in_rounds and force.heads_per_round is None:
            facts["multiprocessors (without heads_per_round)"] = f"{multiprocessors(device)}"
        return facts

    @property
    def token_layout(self) -> Layout:
        """Where tokens are; in cross-attention without slices it makes no difference."""
        free = self.shape.tokens_kv and not self.sample_args
        return Layout.CONTIGUOUS if free else Layout(self.layout)

    def spec(self, topology: Topology, kernel: Kernel) -> Spec:
        """How the call runs, as far as its options say; choices that they leave open are None."""
        return spec_of(self.config, topology, self.shape, self.token_layout, self.mask, kernel)

    def describe(self) -> dict[str, str]:
        """By name; devices without what may differ between ranks."""
        words = {name: str(tuple(shape)) for name, shape in zip("qkv", self.shapes, strict=True)}
        words["dtype"] = ", ".join(map(str, self.dtypes))
        words["device"] = ", ".join(map(self._place_of, self.devices))
        for name in ("gradients", "causal", "softmax_scale", "layout", "qkv_format", "config"):
            words[name] = str(getattr(self, name))
        words |= dict.fromkeys(self.sample_args, "given")
        if self.sink:
            shape, dtype, device, grad = self.sink
            words["sink"] = f"{shape}, {dtype}, {self._place_of(device)}, gradient {grad}"
        if self.window not in ((None, None), (None, 0)):
            words["window"] = str(self.window)
        for name in ("softcap", "return_max_logit"):
            words |= {name: str(value)} if (value := getattr(self, name)) else {}
        return words | dict(self.wrong_kinds)

    def configuration(self) -> "Call":
        """The call with batch and tokens set to 0, since these vary from call to call; ranks
        compare them once. Unchanged if the shapes do not match each other."""
        q, k, v = self.shapes
        batch = self.qkv_format == "sbhd"
        if not (len(q) == len(k) == len(v) == 4 and q[batch] == k[batch] and k[:2] == v[:2]):
            return self
        sizes = (torch.Size((0, 0, *shape[2:])) for shape in self.shapes)
        return replace(self, shapes=tuple(sizes))

    def _place_of(self, device: torch.device) -> str:
        return device.type + " (not the current device)" * self.is_elsewhere(device)

    def is_elsewhere(self, device: torch.device) -> bool:
        """Whether a device is a GPU other than the process's current one."""
        return device.type == "cuda" and device.index != self.current_device


def attention_shape(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> AttentionShape:
    """Sizes of a call whose q, k and v have these "bshd" shapes, with gradients between ranks as
    wide as sums."""
    (batch, tokens, heads_q, dim_qk), (_, keys, heads_kv, dim_v) = shapes[0], shapes[2]
    item, sums = dtype.itemsize, accumulate_dtype(dtype).itemsize
    heads = heads_q, heads_kv, dim_qk, dim_v
    tokens_kv = None if keys == tokens else keys
    return AttentionShape(batch, tokens, *heads, item, sums, sums, tokens_kv)


def spec_of(
    config: BurstConfig, topology: Topology, shape: AttentionShape, layout: Layout, mask: Mask,
    kernel: Kernel,
) -> Spec:  # fmt: skip
    """How a call runs, as far as options say; `Spec` explains the other arguments."""
    force = config.force
    circulate = _unless_auto(force.circulate)
    return Spec(
        topology, shape, layout, mask, kernel, config.keep != "none",
        inter="flat" if force.flat else _unless_auto("a2a" if config.invariant else config.inter),
        intra=_unless_auto(config.intra), invariant=config.invariant,
        heads_per_round=force.heads_per_round if force.pieces else 0,
        grad_wire=_unless_auto(force.grad_wire), circulate=circulate and Circulate(circulate),
        pulled={"pull": True, "send": False}.get(force.transfer),
        saves_remote={"never": True, "always": False}.get(force.resend),
    )  # fmt: skip


def _unless_auto(option: str) -> str | None:
    """An option's value; None for "auto"."""
    return None if option == "auto" else option


def key_of(
    q: Tensor, k: Tensor, v: Tensor, args: CallArgs, sink: Tensor | None = None
) -> Hashable | None:
    """A key of the call, found faster than the call itself; None if arguments are of unusual kinds.

    Equal keys are of equal calls.
    """
    kinds = type(args.causal), type(args.return_lse), type(args.layer), type(args.config)
    are_plain = type(q) is type(k) is type(v) is Tensor and is_sink(sink)
    if kinds != _USUAL or not are_plain or q.is_nested:
        return None
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    ways = args[:7]  # up to the largest logit
    try:
        hash(ways)
    except TypeError:
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.layout, k.layout, v.layout, torch.cuda.current_device() if q.is_cuda else None, grads,
        _sink_key(sink), ways, args.config, args.sample_args,
    )  # fmt: skip


def _sink_key(sink: Tensor | None) -> tuple:
    """What ranks compare of sinks."""
    if sink is None:
        return ()
    grad = torch.is_grad_enabled() and sink.requires_grad
    return tuple(sink.shape), sink.dtype, sink.device, grad


def call_of(tensors: Sequence[Tensor], args: CallArgs, sink: Tensor | None = None) -> Call:
    """The call with q, k and v, and sinks.

    An argument of another kind is only named, so that ranks can still compare their calls.
    """
    names = *"qkv", "sink", *CallArgs._fields
    named = zip(names, (*tensors, sink, *args), strict=True)
    wrong = tuple((name, short_repr(x)) for name, x in named if not KINDS[name].holds(x))
    if wrong:
        tensors = [x if is_dense(x) else torch.empty(0) for x in tensors]
        usual, sink = CallArgs._field_defaults, sink if is_sink(sink) else None
        args = args._replace(**{name: usual[name] for name, _ in wrong if name in usual})
    added = (1,) if args.qkv_format == "thd" else ()
    scale, dim = args.softmax_scale, tensors[0].shape[-1] if tensors[0].dim() else 1
    return Call(
        shapes=tuple((*added, *x.shape) for x in tensors),
        dtypes=tuple(x.dtype for x in tensors),
        devices=tuple(x.device for x in tensors),
        current_device=torch.cuda.current_device() if any(x.is_cuda for x in tensors) else None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        sink=_sink_key(sink),
        causal=args.causal,
        window=window_of(args.window, args.causal),
        sample_args=args.sample_args,
        softmax_scale=max(dim, 1) ** -0.5 if scale is None else float(scale),
        softcap=float(args.softcap),
        layout=args.layout,
        qkv_format=args.qkv_format,
        return_max_logit=args.return_max_logit,
        config=args.config,
        wrong_kinds=wrong,
    )
