"""A call: what must be the same on all ranks, and what of it is refused."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from numbers import Integral, Number, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.config import BurstConfig
from megatron_burst.errors import BurstError, Need, require
from megatron_burst.kernels.backends import Problem, arch_of, choose_backend, multiprocessors, pick
from megatron_burst.kernels.partial import accumulate_dtype
from megatron_burst.schedule.layout import Layout, check_tokens
from megatron_burst.schedule.mask import SLICES, Mask
from megatron_burst.schedule.spec import AttentionShape, Circulate, Kernel, Spec
from megatron_burst.schedule.topology import Topology
from megatron_burst.version import __version__

_WHO = "burst attention"
_USUAL = bool, bool, int, BurstConfig
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Asked(NamedTuple):
    """Arguments of `burst_attention` besides tensors, as the caller passed them."""

    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    layout: str = "zigzag"
    qkv_format: str = "bshd"
    return_lse: bool = False
    config: BurstConfig = BurstConfig()
    layer: int = 0
    given: tuple[str, ...] = ()  # from `given_in`


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
    given: tuple[str, ...]
    softmax_scale: float
    layout: str
    qkv_format: str
    config: BurstConfig
    wrong: tuple[tuple[str, str], ...]  # arguments of another kind, and what they are

    @property
    def packed(self) -> bool:
        """Whether the sequence is a packed sample."""
        return "cu_seqlens" in self.given

    @property
    def sliced(self) -> bool:
        """Whether a run is told what a query sees by slices, which a tree becomes."""
        return "slices" in self.given or "prefix_tree" in self.given

    @property
    def mask(self) -> Mask:
        """Which keys a query sees, by position; slices, as documents, only tell a run."""
        if self.sliced:
            in_order = self.causal and self.layout != Layout.DOCUMENTS
            return Mask(None, 0 if in_order else None, True)
        return Mask(*self.window, self.packed)

    @property
    def shape(self) -> AttentionShape:
        """Sizes on one rank; gradients between ranks as wide as sums."""
        shapes = self.shapes
        if self.qkv_format == "sbhd":
            shapes = tuple((batch, tokens, *rest) for tokens, batch, *rest in shapes)
        return attention_shape(shapes, self.dtypes[0])

    @property
    def problem(self) -> Problem:
        """What a kernel must support."""
        shape, mask, device = self.shape, self.mask, self.devices[0]
        return Problem(
            device.type, self.dtypes[0], shape.dim_qk, shape.dim_v,
            shape.heads_q != shape.heads_kv, self.config.reproducible, arch_of(device),
            frozenset({SLICES}) if self.sliced else mask.needs, self.config.invariant,
            shape.is_huge,
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
        in_rounds = config.intra != "ring" and not config.flat and config.pieces
        if in_rounds and config.heads_per_round is None:
            facts["multiprocessors (without heads_per_round)"] = f"{multiprocessors(device)}"
        return facts

    @property
    def sharding(self) -> Layout:
        """Where tokens are; in cross-attention without slices it makes no difference."""
        free = self.shape.tokens_kv and not self.given
        return Layout.CONTIGUOUS if free else Layout(self.layout)

    def spec(self, topology: Topology, kernel: Kernel) -> Spec:
        """How the call runs, as far as its options say; choices that they leave open are None."""
        return spec_of(self.config, topology, self.shape, self.sharding, self.mask, kernel)

    def check(self, cp_size: int) -> None:
        """Refuse an invalid call; by now it is the same on all ranks.

        Raises:
            BurstError: in one sentence.
        """
        require(_WHO, (_need_of(name, got) for name, got in self.wrong))
        require(_WHO, chain.from_iterable(of(self) for of in _NEEDS))
        for tokens in (self.shape.tokens, self.shape.keys):
            check_tokens(self.sharding, cp_size, tokens)

    def in_words(self) -> dict[str, str]:
        """By name; devices without what may differ between ranks."""
        words = {name: str(tuple(shape)) for name, shape in zip("qkv", self.shapes, strict=True)}
        words["dtype"] = ", ".join(map(str, self.dtypes))
        words["device"] = ", ".join(map(self._place_of, self.devices))
        for name in ("gradients", "causal", "softmax_scale", "layout", "qkv_format", "config"):
            words[name] = str(getattr(self, name))
        words |= dict.fromkeys(self.given, "given")
        if self.sink:
            shape, dtype, device, grad = self.sink
            words["sink"] = f"{shape}, {dtype}, {self._place_of(device)}, gradient {grad}"
        if self.window not in ((None, None), (None, 0)):
            words["window"] = str(self.window)
        return words | dict(self.wrong)

    def configuration(self) -> "Call":
        """The call with batch and tokens set to 0, since these vary from call to call; ranks
        compare them once. Unchanged if the shapes do not match each other."""
        q, k, v = self.shapes
        batch = self.qkv_format == "sbhd"
        if not (len(q) == len(k) == len(v) == 4 and q[batch] == k[batch] and k[:2] == v[:2]):
            return self
        rest = (torch.Size((0, 0, *shape[2:])) for shape in self.shapes)
        return replace(self, shapes=tuple(rest))

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
    other = None if keys == tokens else keys
    return AttentionShape(batch, tokens, *heads, item, sums, sums, other)


def spec_of(
    config: BurstConfig, topology: Topology, shape: AttentionShape, layout: Layout, mask: Mask,
    kernel: Kernel,
) -> Spec:  # fmt: skip
    """How a call runs, as far as options say; `Spec` explains the other arguments."""
    circulate = _given(config.circulate)
    return Spec(
        topology, shape, layout, mask, kernel, config.keep != "none",
        inter="flat" if config.flat else _given("a2a" if config.invariant else config.inter),
        intra=_given(config.intra), invariant=config.invariant,
        heads_per_round=config.heads_per_round if config.pieces else 0,
        grad_wire=_given(config.grad_wire), circulate=circulate and Circulate(circulate),
        pulled={"pull": True, "send": False}.get(config.transfer),
        left={"never": True, "always": False}.get(config.resend),
    )  # fmt: skip


def _given(option: str) -> str | None:
    """An option's value; None for "auto"."""
    return None if option == "auto" else option


def window_of(
    window: tuple[int | None, int | None] | None, causal: bool
) -> tuple[int | None, int | None]:
    """(left, right) as masks take it: None for no bound.

    Raises:
        BurstError: if it is not a pair of numbers of positions.
    """
    require(_WHO, () if _is_window(window) else [_need_of("window", brief(window))])
    bounds = (None, None) if window is None else window
    left, right = (None if bound in (None, -1) else int(bound) for bound in bounds)
    return left, 0 if causal else right


def given_in(
    cu_seqlens: object, padded: object, longest: object, parents: object, slices: object
) -> tuple[str, ...]:
    """Which arguments describe a packed sample or a mask of slices; beside boundaries ranks need
    not all say the longest."""
    if cu_seqlens is slices is padded is longest is parents is None:
        return ()
    names = "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "prefix_tree", "slices"
    given = cu_seqlens, padded, longest if cu_seqlens is None else None, parents, slices
    return tuple(name for name, x in zip(names, given, strict=True) if x is not None)


def key_of(
    q: Tensor, k: Tensor, v: Tensor, asked: Asked, sink: Tensor | None = None
) -> Hashable | None:
    """A key of the call, found faster than the call itself; None if arguments are of unusual kinds.

    Equal keys are of equal calls.
    """
    kinds = type(asked.causal), type(asked.return_lse), type(asked.layer), type(asked.config)
    if kinds != _USUAL or not type(q) is type(k) is type(v) is Tensor or q.is_nested:
        return None
    if not _is_sink(sink):
        return None
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    ways = asked[:5]  # up to the format
    try:
        hash(ways)
    except TypeError:
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.layout, k.layout, v.layout, torch.cuda.current_device() if q.is_cuda else None, grads,
        _seen_of(sink), ways, asked.config, asked.given,
    )  # fmt: skip


def _seen_of(sink: Tensor | None) -> tuple:
    """What ranks compare of sinks."""
    if sink is None:
        return ()
    grad = torch.is_grad_enabled() and sink.requires_grad
    return tuple(sink.shape), sink.dtype, sink.device, grad


def call_of(tensors: Sequence[Tensor], asked: Asked, sink: Tensor | None = None) -> Call:
    """The call with q, k and v, and sinks.

    An argument of another kind is only named, so that ranks can still compare their calls.
    """
    names = *"qkv", "sink", *Asked._fields
    given = zip(names, (*tensors, sink, *asked), strict=True)
    wrong = tuple((name, brief(x)) for name, x in given if not _KINDS[name].holds(x))
    if wrong:
        tensors = [x if is_dense(x) else torch.empty(0) for x in tensors]
        usual, sink = Asked._field_defaults, sink if _is_sink(sink) else None
        asked = asked._replace(**{name: usual[name] for name, _ in wrong if name in usual})
    added = (1,) if asked.qkv_format == "thd" else ()
    scale, dim = asked.softmax_scale, tensors[0].shape[-1] if tensors[0].dim() else 1
    return Call(
        shapes=tuple((*added, *x.shape) for x in tensors),
        dtypes=tuple(x.dtype for x in tensors),
        devices=tuple(x.device for x in tensors),
        current_device=torch.cuda.current_device() if any(x.is_cuda for x in tensors) else None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        sink=_seen_of(sink),
        causal=asked.causal,
        window=window_of(asked.window, asked.causal),
        given=asked.given,
        softmax_scale=max(dim, 1) ** -0.5 if scale is None else float(scale),
        layout=asked.layout,
        qkv_format=asked.qkv_format,
        config=asked.config,
        wrong=wrong,
    )


# ---- kinds of arguments -----------------------------------------------------------------------


def is_strided(x: object) -> bool:
    """Whether it is a tensor in rows: not sparse, nested or a DTensor (which has `to_local`)."""
    if not isinstance(x, Tensor):
        return False
    return x.layout is torch.strided and not (x.is_nested or hasattr(x, "to_local"))


def is_dense(x: object) -> bool:
    """Whether it is such a tensor with data."""
    return is_strided(x) and not x.is_meta


def _is_sink(x: object) -> bool:
    return x is None or is_dense(x)


def _is_whole(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_window(x: object) -> bool:
    if not isinstance(x, Sequence):
        return x is None
    return len(x) == 2 and all(y is None or (_is_whole(y) and y >= -1) for y in x)


class _Kind(NamedTuple):
    """What an argument must be."""

    holds: Callable[[Any], bool]
    must: str  # be, and why
    change: str


_TENSOR = _Kind(
    is_dense,
    "must be a dense tensor with data, because kernels read its rows",
    "pass one, or call to_local() on a DTensor",
)
_SWITCH = _Kind(
    lambda x: isinstance(x, bool),
    "must be True or False, because anything else could mean either", "pass one of them",
)  # fmt: skip
_WORD = _Kind(
    lambda x: isinstance(x, str),
    "must be a word, because it names one of several ways", "pass one of them",
)  # fmt: skip
_KINDS = {
    **dict.fromkeys("qkv", _TENSOR),
    "sink": _TENSOR._replace(holds=_is_sink, change="pass one, or leave it out"),
    **dict.fromkeys(("causal", "return_lse"), _SWITCH),
    "window": _Kind(
        _is_window,
        "must be (left, right), the number of earlier and of later positions that a query attends "
        "to, each at least 0, or None or -1 for no bound",
        "pass such a pair",
    ),
    "softmax_scale": _Kind(
        lambda x: x is None or (isinstance(x, Real) and x is not True and not abs(x) > 3e38),
        "must be a number within float32, because kernels scale in that and return no gradient",
        "pass a float; if it is learned, multiply q by it and pass softmax_scale=1.0",
    ),
    **dict.fromkeys(("layout", "qkv_format"), _WORD),
    "config": _Kind(
        lambda x: isinstance(x, BurstConfig),
        "must be a BurstConfig, because that checks its options",
        "pass BurstConfig(...), or leave it out",
    ),
    "layer": _Kind(_is_whole, "must be a whole number, because ranks compare it", "pass one"),
    "given": _Kind(lambda given: True, "", ""),
}


def _need_of(name: str, got: str) -> Need:
    return False, f"{name} {_KINDS[name].must}", got, _KINDS[name].change


def brief(x: object) -> str:
    """What an argument is, in one short line."""
    if isinstance(x, Tensor):
        return f"a {'nested ' * x.is_nested}{type(x).__name__} ({x.layout}, {x.device.type})"
    plain = isinstance(x, str | Number | Sequence | Mapping | None)
    return " ".join(repr(x).split())[:80] if plain else f"a {type(x).__name__}"


# ---- what is refused: whether it holds, what must hold and why, what was got, what to change ----


def _of_names(call: Call) -> Iterator[Need]:
    yield from (
        (call.qkv_format in ("bshd", "sbhd", "thd"),
         "qkv_format must be bshd, sbhd or thd, because it names the order of the axes",
         repr(call.qkv_format), "pass one of these"),
        (call.layout in tuple(Layout),
         f"layout must be one of {', '.join(Layout)}, because it decides which keys a query may "
         "attend to", repr(call.layout), "pass the one in which the tokens are sharded"),
        (call.packed or call.layout != Layout.DOCUMENTS,
         "cu_seqlens must be given for the layout zigzag-documents, because it shards each "
         "document on its own", "no cu_seqlens", "pass it, or another layout"),
    )  # fmt: skip


def _of_sample(call: Call) -> Iterator[Need]:
    tree, slices = "prefix_tree" in call.given, "slices" in call.given
    others = ", ".join(name for name in call.given if name != "slices")
    yield from (
        (call.packed or not others,
         f"cu_seqlens must come with {others}, because it says where documents begin and end",
         "no cu_seqlens", f"pass it, or leave out {others}"),
        (not tree or call.window == (None, 0),
         "a prefix tree must be causal and without a window, because a query attends to all "
         "ancestors of its segment", f"causal={call.causal} and window={call.window}",
         "leave out causal and window, or prefix_tree"),
        (not slices or (call.window in ((None, 0), (None, None)) and not tree),
         "slices must come without a window and a prefix tree, because slices alone say what a "
         "query sees", f"window={call.window}" + ", prefix_tree" * tree,
         "leave these out, and add slices for them"),
        (not slices or call.layout != Layout.STRIPED,
         "with slices the sample must be sharded in chunks, because kernels need to know where a "
         "rank's rows are", "layout striped", "shard it in zigzag or contiguous"),
        (not slices or not call.packed or call.layout == Layout.DOCUMENTS,
         "slices must come without cu_seqlens, except in the layout zigzag-documents, because "
         "slices alone say what a query sees", "both",
         "leave cu_seqlens out, and add slices for the documents"),
        (not tree or call.layout != Layout.DOCUMENTS,
         "a prefix tree must be sharded as one sample, because segments attend to each other",
         f"layout {call.layout}", "shard the sample in zigzag or contiguous, without padding"),
    )  # fmt: skip


def _of_shapes(call: Call) -> Iterator[Need]:
    q, k, v = call.shapes
    packed = call.qkv_format == "thd"  # with a batch axis of 1 added
    got = ", ".join(f"{n} {tuple(x)[packed:]}" for n, x in zip("qkv", call.shapes, strict=True))
    yield (
        all(len(shape) == 4 for shape in (q, k, v)),
        f"q, k and v must have {'three' if packed else 'four'} axes ({call.qkv_format}), "
        "because heads have an axis of their own", got, "reshape them",
    )  # fmt: skip
    batch = call.qkv_format == "sbhd"  # the number of its axis
    yield from (
        (not call.packed or q[batch] == 1,
         "packed documents must have batch size 1, because cu_seqlens describes a single sample",
         got, "pass a batch of one"),
        (q[batch] == k[batch] and k[:3] == v[:3] and q[3] == k[3],
         "q, k and v must agree in batch, k and v in heads and tokens, q and k in head dimension, "
         "because each key is compared with queries and has a value", got, "pass matching shards"),
        (batch or call.mask.full or not q[2] == k[2] > q[1] > k[1],
         "q, k and v must be [b, s, h, d], because the sequence is the second axis", got,
         "pass x.transpose(1, 2) of [b, h, s, d], as for scaled_dot_product_attention"),
        (q[1 - batch] == k[1 - batch] or (call.mask.full and not call.packed),
         "q and k must have equally many tokens if the mask is causal, a window or documents, "
         "because these compare positions in one sequence", got,
         "for cross-attention pass causal=False, without a window and cu_seqlens, or slices"),
        (0 not in (*q, *k, *v) and q[2] % k[2] == 0,
         "the number of KV heads must divide that of query heads and no axis may be empty, because "
         "each KV head serves equally many query heads", got,
         "change the heads (in Megatron --num-query-groups) or the batch"),
    )  # fmt: skip


def _of_tensors(call: Call) -> Iterator[Need]:
    device = call.devices[0]
    yield from (
        (call.dtypes[0] in _DTYPES and len(set(call.dtypes)) == 1,
         "q, k and v must have one dtype among float64, float32, bfloat16 and float16, because "
         "nothing is converted silently", ", ".join(map(str, call.dtypes)), "cast them"),
        (len(set(call.devices)) == 1,
         "q, k and v must be on one device, because one kernel reads them",
         ", ".join(map(str, call.devices)), "move them"),
        (not call.is_elsewhere(device),
         "q, k and v must be on the process's current device, because streams and transfers belong "
         "to it", f"{device} while cuda:{call.current_device} is current",
         "call torch.cuda.set_device(LOCAL_RANK) first"),
    )  # fmt: skip


def _of_sink(call: Call) -> Iterator[Need]:
    if not call.sink:
        return
    (shape, dtype, device, _), heads = call.sink, call.shapes[0][2]
    yield from (
        (shape == (heads,),
         "sink must have one score for each query head, because it joins the softmax of each head",
         f"shape {shape} and {heads} query heads", "pass this rank's heads"),
        (dtype in (torch.float32, call.dtypes[0]),
         "sink must be in float32 or in q's dtype, because kernels read it as it is", dtype,
         "cast it"),
        (device == call.devices[0],
         "sink must be on the device of q, k and v, because one kernel reads them", device,
         "move it"),
    )  # fmt: skip


def _of_options(call: Call) -> Iterator[Need]:
    yield (
        torch.finfo(torch.float32).tiny <= call.softmax_scale < float("inf"),
        "softmax_scale must be positive and finite, because kernels take the largest score "
        "before they scale it", call.softmax_scale, "leave it out for d ** -0.5",
    )  # fmt: skip
    config = call.config
    given = config.keep == "auto", config.keep_layers is not None, config.offloads_inputs
    for name, is_given in zip(("keep", "keep_layers", "keep_offload"), given, strict=True):
        yield (
            not is_given,
            f"{name} must be resolved by Megatron's layers, because a single call does not know "
            "the other layers", f"{name}={getattr(config, name)}",
            "pass keep none, half or all to each call, and leave the rest out",
        )  # fmt: skip


_NEEDS = _of_names, _of_sample, _of_shapes, _of_tensors, _of_sink, _of_options
