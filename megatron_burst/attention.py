"""burst_attention: exact attention over a process group, with autograd."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.arguments import CallArgs, sample_args_of
from megatron_burst.call import Call, call_of, key_of
from megatron_burst.call_checks import check
from megatron_burst.comm.alone import Ranks, group_or_default, is_first
from megatron_burst.comm.communicator import Communicator, communicator_of
from megatron_burst.comm.detector import Pass, PassAnnouncer, PassKind
from megatron_burst.comm.group import Group, state_of
from megatron_burst.config import BurstConfig
from megatron_burst.engine.passes import Passes, recording
from megatron_burst.engine.ranges import range_of_pass
from megatron_burst.engine.sample_mask import SampleMask
from megatron_burst.errors import BurstError
from megatron_burst.kernels.backends import choose_backend, kernel_of
from megatron_burst.kernels.interface import Backend
from megatron_burst.kernels.partial import row_delta, sink_grad
from megatron_burst.logs import Decision, log_message
from megatron_burst.resolve import resolve
from megatron_burst.schedule.spec import Direction, Spec
from megatron_burst.transforms import autocast_inputs, compilable, is_captured, refuse_transforms

_WHO = "burst attention"
_DENSE = torch.contiguous_format
_AS_IS, _USUAL = nullcontext(), BurstConfig()


def burst_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Ranks = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    max_seqlen: int | None = None,
    prefix_tree: Sequence[int] | Tensor | None = None,
    slices: Tensor | None = None,
    sink: Tensor | None = None,
    layout: Literal["zigzag", "contiguous", "striped", "zigzag-documents"] = "zigzag",
    qkv_format: Literal["bshd", "sbhd", "thd"] = "bshd",
    return_lse: bool = False,
    return_max_logit: bool = False,
    config: BurstConfig | None = None,
    layer: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """Exact softmax attention of a sequence that is sharded over the ranks of a group.

    Every rank passes its own rows and gets its own rows of the output. By default K and V are
    gathered inside a node, a few KV heads at a time. Between nodes, K and V circulate in a ring in
    forward. In backward (K, V, dK, dV) or (Q, dO, dQ) circulate, whichever is fewer bytes; K and V
    need not, if they are few enough to stay from forward. Parts of gradients move in the model's
    dtype (unless `Force.grad_wire`). They are summed in max(float32, input dtype), once in each
    node and once by the rank whose rows they are. Under torch's autocast q, k and v are cast to its
    dtype, as for torch's own attention.

    Under `torch.no_grad` nothing is saved for backward. All ranks of the group must call with the
    same shapes and options. If one of them runs backward through the output, all of them must,
    because each needs the others' shards. Inside activation checkpoints (`torch.utils.checkpoint`
    or Megatron's), `config.keep` lets recomputation reuse the results of the first pass (from the
    process's second checkpoint on; the first call sets this up). In torch.compile it is one
    operator of the graph (`megatron_burst.operators`), but with `config.keep` or `config.check` a
    graph break. A CUDA graph may capture it (`megatron_burst.cuda_graphs`), once it has run; each
    replay reads inputs and boundaries again, and neither checks nor compares anything.

    Args:
        q: [b, s_local, h, d_qk], or [s_local, b, h, d_qk] for "sbhd"; float64, float32, bfloat16
            or float16.
        k: [b, k_local, h_kv, d_qk]; h_kv divides h, and heads are not expanded. In cross-attention
            k_local differs from s_local: keys are another sequence, sharded over the same ranks.
            It must not be causal, and may have slices, but no window and documents.
        v: [b, k_local, h_kv, d_v].
        group: the context-parallel group, or that dimension of a DeviceMesh; None is the default
            group, or this process alone if there is none.
        causal: whether to mask keys at later positions of the whole sequence.
        window: (left, right): the number of earlier and of later positions that a query attends to;
            None or -1: no bound. With `causal` it attends to no later ones, whatever `right` is.
        cu_seqlens: int32 or int64 [documents + 1], for one packed sample with batch size 1: 0, then
            the end of each document in the whole sample; needed if the last `shard` had it. Queries
            attend to keys of their own document only; rows after the last one attend to nothing and
            get zeros. Tensors on the CPU are checked at once, on a GPU in backward, without
            synchronizing; there, writes that torch does not count (`.data`, DLPack) are missed.
        cu_seqlens_padded: the same, including each document's padding, which is at its end and gets
            zeros; `cu_seqlens` then has the lengths without padding.
        max_seqlen: number of tokens of the longest document, or more. None computes it, which
            synchronizes once per sample if `cu_seqlens` is on a GPU.
        prefix_tree: the number of each `cu_seqlens` segment's parent, -1 for none: a query attends
            to its own segment causally, and to all of its ancestors. A list, or int32 or int64
            [segments] on the CPU. Segments are stored depth first: each directly after its parent,
            or after the last descendant of its previous sibling. Causal only, without windows and
            padding, in "zigzag" or "contiguous"; synchronizes once per sample if `cu_seqlens` is on
            a GPU.
        slices: int32 or int64 [slices, 5] on the CPU: queries [start, stop), keys [start, stop) and
            kind of each part of the score matrix that is computed, by positions in the whole
            sample; all else is masked. Kinds: 0 full; 1 causal, the last query level with the last
            key; 2 inverse causal, the first query level with the first key; 3 both. They must not
            overlap, and unless `causal` is False no key may be at a later position than its query.
            `layout` "zigzag" or "contiguous", or "zigzag-documents" with `cu_seqlens`, which then
            says only where rows are. Makers of usual masks: `megatron_burst.slices`.
        sink: [h], float32 or q's dtype: attention sinks, one more score for each query of a head,
            without a value (gpt-oss); zeros are softmax-off-by-one. The same on all ranks. Its
            gradient is of this rank's rows: sum it over the group, as Megatron does with gradients
            of parameters.
        softmax_scale: scale of the scores; None is d_qk ** -0.5.
        softcap: bound of the scores, softcap * tanh(score / softcap), as in Gemma 2; 0: none.
        layout: which positions a rank holds; "zigzag" (Megatron's): chunks r and 2P-1-r of 2P;
            "zigzag-documents" (TransformerEngine's THD): the same for each document. Of no account
            without a mask, else the last `shard`'s; in cross-attention of queries and of keys.
        qkv_format: order of the first two axes; "thd": no batch, [s_local, h, d].
        return_lse: whether to also return the log-sum-exp of the scores, sinks included.
        return_max_logit: whether to also return the largest score of each head over all ranks, as
            QK-clip needs it: scaled, capped and without sinks, of keys that some query sees.
        config: options.
        layer: a number of the caller's choice, from 1, which errors name; 0 for none. With it, a
            rank that skips one of several identical calls is detected at its next call. Not known
            in compiled code.

    Returns:
        out, shaped as q with d_v for d_qk and in q's dtype; with return_lse also lse [b, h,
        s_local] ([h, s_local] for "thd") in max(float32, input dtype); with return_max_logit also
        the largest scores [h] in that dtype. Neither carries a gradient.

    Raises:
        BurstError: if the input is not supported, or inside torch.func's transforms, vmap and
            forward-mode AD; before anything is sent, and on all ranks if they pass the same. If
            ranks make different calls, or one skips a call (of several that look the same: with
            `layer`), all raise it: on CPUs in the same pass, before anything is sent; on GPUs in
            the next pass, or before an optimizer of torch's writes weights. The group raises it in
            all later calls too, unless ranks that catch it can go on: if on CPUs they made the same
            call with other arguments. If a pass fails on some ranks only (out of memory), the
            others raise it, on CPUs in the same pass, on GPUs in the next; if on all, it can be
            made again.

    Source: BurstAttention (arXiv 2403.09347), BurstEngine (arXiv 2509.19836).
    """
    sample = cu_seqlens, cu_seqlens_padded, max_seqlen, prefix_tree, slices
    options = causal, window, softmax_scale, softcap, layout, qkv_format, return_max_logit
    results = _burst_attention((q, k, v), sink, sample, group, options, return_lse, config, layer)
    return results if return_lse or return_max_logit else results[0]


@compilable("megatron_burst.operators:traced_attention")
def _burst_attention(
    tensors: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, sample: tuple, group: Ranks,
    options: tuple, return_lse: bool, config: BurstConfig | None, layer: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`burst_attention`; `options`: the first of `CallArgs`."""
    refuse_transforms(_WHO, *tensors, sink, capturable=True)
    config, sample_args = _USUAL if config is None else config, sample_args_of(*sample)
    args = CallArgs._make((*options, return_lse, config, layer, sample_args))
    ready = ready_call(autocast_inputs(*tensors), sink, args, sample, group)
    passes, mask, (q, k, v) = ready.passes, ready.sample_mask, ready.tensors
    largest: Any = None
    if args.return_max_logit:
        from megatron_burst.largest_logits import LargestLogits  # which most runs never load

        largest = LargestLogits.of_call(q, passes, ready.group)
    run = partial(_attend, passes=passes, sample_mask=mask, layer=layer, largest=largest)
    inputs = (q, k, v) if sink is None else (q, k, v, sink)
    out, lse = passes.keep(run, inputs) if passes.keep else run(*inputs)
    results = ready.as_given(out, lse) if return_lse else ready.as_given(out)
    return results if largest is None else (*results, largest.scores)


class ReadyCall(NamedTuple):
    """A call that all ranks agree on; q, k and v in "bshd"."""

    passes: Passes
    sample_mask: SampleMask | None
    tensors: tuple[Tensor, Tensor, Tensor]
    group: dist.ProcessGroup
    qkv_format: str

    def as_given(self, out: Tensor, *lse: Tensor) -> tuple[Tensor, ...]:
        """out [b, n, h, d], and lse [b, h, n] if it is passed, in the call's format."""
        if self.qkv_format == "thd":
            return tuple(x.squeeze(0) for x in (out, *lse))
        return *to_bshd(self.qkv_format, out), *lse


def ready_call(
    tensors: tuple[Tensor, ...], sink: Tensor | None, args: CallArgs, sample: tuple, group: Ranks
) -> ReadyCall:
    """What a call runs. `tensors`: q, k and v as given; `sample`: fields of `Sample`.

    Raises:
        BurstError: as `burst_attention`.
    """
    (q, k, v), sample_args = tensors, args.sample_args
    group, key = group_or_default(group, _WHO), key_of(q, k, v, args, sink)
    call = None if key else call_of((q, k, v), args, sink)
    state = state_of(group, (call.config if call else args.config).timeout_s)
    passes: Any = state.resolved.recent(key or call)
    in_graph, sample_mask = is_captured(q), None
    if passes is None and not in_graph:
        call = call or call_of((q, k, v), args, sink)
        passes = state.resolved[key or call] = _prepare(call, group, state)
    try:
        if in_graph:
            passes = _captured(passes)
        q, k, v = (_readable(x) for x in to_bshd(args.qkv_format, q, k, v))
        if state.sharded is not None:
            from megatron_burst.masks.sample import check_rows  # which most runs never load

            mask = args.layout, bool(args.causal or args.window), sample_args
            check_rows(state.sharded, mask, (q, k), group.size())
        if sample_args:
            from megatron_burst.masks.slices import mask_of  # likewise

            sizes = q.shape[1], group.size(), k.shape[1]
            sample_mask = mask_of(state, sample, args.causal, sizes, args.layout, q)
    except Exception as error:  # out of memory too: a rank must not skip a pass without a word
        state.refuse(error)
    return ReadyCall(passes, sample_mask, (q, k, v), group, args.qkv_format)


def _captured(passes: Passes | None) -> Passes:
    """The passes of a call that a CUDA graph captures, and that has run with these before."""
    from megatron_burst.cuda_graphs import captured  # which most runs never load

    return captured(passes)


def _prepare(call: Call, group: dist.ProcessGroup, state: Group) -> Passes:
    """A new call, once all ranks agree and it is valid.

    Ranks compare calls before anything is checked, so an error on one rank becomes a disagreement
    that all of them see. New sizes under a configuration that they agreed on need no comparison:
    every rank derives the same from them.

    Raises:
        BurstError: on all ranks, if they differ or the call cannot run.
    """
    configuration, words = call.configuration(), call.describe()
    is_new = state.agree(words, _WHO, configuration)
    try:
        check(call, group.size())
        passes, choices = _choose(call, group, state)
    except Exception as error:
        if not (is_new and isinstance(error, BurstError)):  # which all ranks raise
            state.refuse(error, words)
        raise
    logged_key = replace(configuration, gradients=True), tuple(choice.value for choice in choices)
    if logged_key not in state.logged and is_first():
        log_message(f"{_WHO}: {'; '.join(map(str, choices))}")
    state.logged[logged_key] = None
    return passes


def _choose(call: Call, group: dist.ProcessGroup, state: Group) -> tuple[Passes, list[Decision]]:
    """How a valid call runs, and why."""
    transport = communicator_of(group, call.config)
    topic = "facts", call.configuration()
    if not state.consensus.has_agreed(topic):  # if it has, so have the other ranks
        state.consensus.agree(call.facts(), _WHO, topic)
    backend, backend_choice = choose_backend(call.problem, call.config.backend)
    opened = call.spec(transport.topology, kernel_of(backend, call.devices[0]))
    spec, reasons = resolve(opened)
    if spec.mode_topology != transport.topology:
        transport = communicator_of(group, call.config, flat=True)
    announcer = PassAnnouncer.of(state.log, call.describe())
    # between nodes as decided for the call, whatever is kept
    opened = replace(opened, inter=reasons["inter"].value)
    passes_of = partial(_passes_of, call, backend, transport, announcer)

    def plan_of(keeps: bool) -> Passes:
        """How the call runs, if results are kept or no backward follows, or else."""
        return passes_of(replace(opened, resends=keeps))

    keep = None
    kept_choices: list[Decision] = []
    if call.config.keep != "none":  # most runs never load it
        from megatron_burst.recompute.later import keep_of

        resent = replace(opened, resends=True)
        keep, kept_choices = keep_of(call, resent, spec, transport, passes_of, announcer)
    choices = _describe_choices(spec, reasons, transport.transfer)
    choices += [_labelled("backend", backend_choice), *kept_choices]
    return replace(plan_of(keeps=False), for_recompute=plan_of(keeps=True), keep=keep), choices


def _passes_of(
    call: Call, backend: Backend, transport: Communicator, announcer: PassAnnouncer, opened: Spec
) -> Passes:
    """Both passes of a call whose choices are made as far as `opened` says."""
    spec, _ = resolve(opened)
    spec = replace(spec, pulled=spec.pulled and transport.transfer.value == "pull")
    config = call.config
    return Passes(
        spec, backend, transport, call.softmax_scale, call.dtypes[0], config.reproducible,
        config.nan_guard, announcer, check=config.check, softcap=call.softcap,
    )  # fmt: skip


def _describe_choices(
    spec: Spec, reasons: Mapping[str, Decision], transfer: Decision
) -> list[Decision]:
    """The choices made for a call, as the user reads them."""
    row, between = spec.mode_topology, spec.topology.inter_size > 1
    choices = [_labelled("between nodes", reasons["inter"])] if between else []
    if spec.topology.cp_size == 1:
        return [*choices, Decision("one rank: the kernel alone")]
    choices += [Decision(f"{row}"), reasons["intra"]]
    choices += [Decision(f"layout {spec.layout}")] * spec.mask.documents
    if spec.intra == "ring" or row.inter_size > 1:
        choices.append(_labelled("circulate", reasons["circulate"]))
    if spec.intra == "gather":
        heads = f"{spec.heads_per_round} of {spec.shape.heads_kv} KV heads per round"
        choices += [Decision(heads), transfer]
        if spec.a2a_backward_heads:
            gain = "its kernels are faster over whole sequences than over chunks of them"
            choices.append(Decision("backward a2a", gain))
    elif spec.intra == "a2a":
        choices += [Decision(f"{spec.heads_per_round} KV heads of a rank per round"), transfer]
    return choices


def _labelled(label: str, choice: Decision) -> Decision:
    return replace(choice, value=f"{label} {choice.value}")


def to_bshd(qkv_format: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [..., h, d] of a call's format in "bshd"; those in "sbhd" also back."""
    if qkv_format == "thd":
        return tuple(x.unsqueeze(0) for x in tensors)
    return tuple(x.transpose(0, 1) for x in tensors) if qkv_format == "sbhd" else tensors


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, passes: Passes,
    sample_mask: SampleMask | None, layer: int, largest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = (q, k, v) if sink is None else (q, k, v, sink)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    followed = differentiated and not recording()  # backward follows without recomputation
    run = passes if followed else passes.for_recompute or passes
    options = run, sample_mask, layer, largest
    if not passes.check:
        return BurstAttentionFunction.apply(q, k, v, sink, *options)
    from megatron_burst.checks.spot_checks import checked  # which most runs never load

    return checked(BurstAttentionFunction.apply, (q, k, v, sink), *options)


class BurstAttentionFunction(torch.autograd.Function):
    """The two passes of one call; saves out and forward's state."""

    @staticmethod
    def forward(ctx, q, k, v, sink, passes, sample_mask, layer, largest):
        text = sample_mask.text if sample_mask else None
        span = range_of_pass(Direction.FORWARD, layer, passes.spec)
        # they run different programs
        kind = PassKind.RECORDING if recording() else PassKind.FORWARD
        with span, _without_autocast(q), Pass(passes.announcer, kind, layer=layer) as running:
            begin = partial(running.begin, text)
            if largest is None:
                out, lse, saved = passes.forward(q, k, v, sample_mask, begin, sink)
            else:
                out, lse, saved = largest.of_pass(passes, q, k, v, sample_mask, begin, sink)
            out = out.to(q.dtype)
        of_sink = (sink, lse) if ctx.needs_input_grad[3] else (None, None)
        ctx.save_for_backward(out, *of_sink, *saved)
        ctx.passes, ctx.sample_mask, ctx.call = passes, sample_mask, (running.number, layer)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse):
        refuse_transforms(_WHO, dout, capturable=True)
        if dout is None:
            return (None,) * 8
        out, sink, lse, *saved = ctx.saved_tensors
        passes = _captured(ctx.passes) if is_captured(dout) else ctx.passes
        number, layer = ctx.call
        span = range_of_pass(Direction.BACKWARD, layer, passes.spec)
        its_backward = Pass(passes.announcer, PassKind.BACKWARD, number, layer)
        with span, _without_autocast(out), its_backward as running:
            text = ctx.sample_mask.checked_text() if ctx.sample_mask else None
            begin = partial(running.begin, text)
            dout = _readable(dout)
            delta = row_delta(dout, out) if ctx.needs_input_grad[3] else None
            grads = passes.backward(saved, out, dout, ctx.sample_mask, begin, delta)
            dsink = None if delta is None else sink_grad(sink, lse, delta)
            return *(grad.to(out.dtype) for grad in grads), dsink, None, None, None, None


def _without_autocast(x: Tensor):
    """Context in which sums keep their dtype."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IS


def _readable(x: Tensor) -> Tensor:
    """The tensor if kernels can read it, else a copy: of rows that overlap, are not dense or not
    aligned to the 16 bytes that the GPU's tensor copies move."""
    boundary = 16 if x.is_cuda else 1
    fits = _is_readable(x.shape, x.stride(), x.itemsize, boundary) and x.data_ptr() % boundary == 0
    return x if fits else x.clone(memory_format=_DENSE)


@lru_cache(maxsize=1024)
def _is_readable(shape: torch.Size, strides: tuple[int, ...], itemsize: int, boundary: int) -> bool:
    """Whether rows are dense, do not overlap, and begin at multiples of `boundary` bytes if the
    first one does."""
    apart = all(size == 1 or stride for size, stride in zip(shape, strides, strict=True))
    aligned = all(stride * itemsize % boundary == 0 for stride in strides[:-1])
    return strides[-1] == 1 and apart and aligned
