"""The planner's prediction for a benchmark row, before or after it is measured."""

import re
from dataclasses import dataclass, replace
from math import inf

from benchmarks.documents import lengths_of, multiple_for
from benchmarks.impls import impls_of
from benchmarks.layers import ATTENTION, MODES, Mode, writes
from benchmarks.sheets import PackedRow, Row
from megatron_burst.call import spec_of
from megatron_burst.rules import a2a_pass_bytes, head_bytes_over_all_rows, max_heads
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask, Span, Tile
from megatron_burst.schedule.spec import AttentionShape, Direction, Kernel
from megatron_burst.schedule.topology import pretend_nodes
from megatron_burst.tools.hardware import GIB, Curve, Hardware, LinkSpeed
from megatron_burst.tools.hardware_file import preset_of
from megatron_burst.tools.job.layer_time import layer_seconds
from megatron_burst.tools.job.memory import memory_of
from megatron_burst.tools.job.model import Model
from megatron_burst.tools.job.peer import as_megatron, megatron_bytes
from megatron_burst.tools.job.strategy import Job, Strategy, open_call
from megatron_burst.tools.simulate import call as calls
from megatron_burst.tools.simulate.call import AttentionCall, attention_time, resolved
from megatron_burst.tools.simulate.kernels import Timer
from megatron_burst.tools.simulate.sample import Packing, Sample

_AGAIN_BEFORE = "2026-11-21T16:45"  # until then backward exchanged Q, K and V again, always
_ENDS_BEFORE = "2026-11-24T13:09"  # until then recomputation with keep made the last product
_RESENT_BEFORE = "2026-11-21T19:27"  # until then keys of other nodes came again in backward
_SLOTS_BEFORE = "2026-11-24T10:30"  # until then few rounds had more slots, long shards larger ones
_SENT_BACK_BEFORE = "2026-11-27T01:50"  # until then all-to-alls in two rounds had a slot less
_ROUNDS_BEFORE = "2026-11-30T13:39"  # until then all-to-alls had fewer rounds on one node
_OWN_BEFORE = "2026-11-24T02:51"  # until then buffers between nodes had memory of their own by use
_WHOLE_BEFORE = "2026-11-27T16"  # until then auto gathered grouped heads of 192/128 in both passes
_BOTH_BEFORE = "2026-11-28T05:15"  # until then an all-to-all of these was one in forward too
_LAYERS = re.compile(r"(\d+) layers?, hidden (\d+), ffn (\d+)\b")  # in the note of a row
_LINK = re.compile(
    r"ring ([\d.e+-]+), all-to-all ([\d.e+-]+) GB/s between \d+ (?:nodes|hosts)"  # hosts before
    r"( of one machine)?"
)

MASKS = {"causal": Mask.CAUSAL, "full": Mask.FULL}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time of a pass, and memory above inputs and outputs; None where it is not known."""

    ms: float
    gib: float | None


def is_of_layers(row: Row) -> bool:
    """Whether a row is of `benchmarks.recompute`: its note has the layers' sizes."""
    return bool(_LAYERS.match(row.note))


def is_standin(row: Row) -> bool:
    """Whether a row is TransformerEngine's ring, predicted by a ring of ours; one rank has none."""
    return (row.impl, row.mode) == ("te", "p2p") and row.ranks > 1


def predict(row: Row, hardware: Hardware | None = None) -> Prediction | None:
    """The prediction for a row, whose measurements are not looked at but for those of links between
    nodes; None if the planner has none. BurstError without hardware and a preset of its GPU."""
    on_cpu, narrow = row.gpu.startswith("CPU"), row.dtype in ("bfloat16", "float16")
    if on_cpu or not narrow or "nan_guard" in row.mode:
        return None
    layers = is_of_layers(row)
    known = writes(row.impl, row.mode) and row.batch == 1
    if not (known if layers else row.impl in ("burst", "ceiling") or is_standin(row)):
        return None
    hardware = hardware or preset_of(row.gpu, "a benchmark's row")
    if layers:
        return _of_layers(row, hardware)
    if isinstance(row, PackedRow):
        return _of_packed(row, hardware)
    return _of_kernel(row, hardware) if row.impl == "ceiling" else _of_attention(row, hardware)


def _of_attention(row: Row, hardware: Hardware) -> Prediction:
    opened = _call(row, hardware)
    call = as_megatron(opened, hardware) if is_standin(row) else resolved(opened)
    call = _with_old_rounds(row, opened, call)
    hardware = _with_links(row, hardware, call)
    work = _tflop(call, Direction.FORWARD)
    seconds = attention_time(call, hardware, Direction.FORWARD, work).seconds
    gib, known = None, "backend=" not in row.mode or row.mode == "backend=cudnn"  # its workspace
    if row.pass_ == "fwd_bwd":
        work += _tflop(call, Direction.BACKWARD)
        seconds += attention_time(call, hardware, Direction.BACKWARD, work).seconds
        if is_standin(row):
            gib = megatron_bytes(call.shape) / GIB
        elif known and not _is_outdated(row, opened, call):
            gib = (calls.buffer_bytes(call) + _left_bytes(call)) / GIB
    return Prediction(1e3 * seconds, gib)


def _tflop(call: AttentionCall, direction: Direction) -> float:
    """Work of one GPU in a pass, TFLOP: of the whole sequence, sharded evenly."""
    shape, size = call.shape, call.topology.cp_size
    pairs = shape.tokens * size * shape.tokens * (0.5 if call.mask.causal else 1)
    dims = shape.dim_qk + shape.dim_v
    if direction is Direction.BACKWARD:
        dims = 3 * shape.dim_qk + 2 * shape.dim_v
    return 2 * pairs * shape.batch * shape.heads_q * dims / 1e12


def _is_outdated(row: Row, opened: AttentionCall, call: AttentionCall) -> bool:
    """Whether the row's run had other buffers than the engine makes now."""
    if call.intra == "ring" or not row.date:
        return False
    is_open = call.intra == "gather" and not opened.heads_per_round
    if (row.nodes > 1 and row.date < _OWN_BEFORE) or (is_open and row.date < _SLOTS_BEFORE):
        return True
    rounds = -(-max_heads(call.shape, call.mode_topology, call.intra) // call.heads_per_round)
    changed = _SENT_BACK_BEFORE if call.intra == "a2a" and rounds == 2 else _SLOTS_BEFORE
    return rounds <= 2 and call.pulled and row.date < changed


def _with_old_rounds(row: Row, opened: AttentionCall, call: AttentionCall) -> AttentionCall:
    """With an all-to-all's rounds of up to 256 MiB, where the row's run had these by default."""
    if row.nodes > 1 or opened.heads_per_round or not "" < row.date < _ROUNDS_BEFORE:
        return call
    in_bytes = max(1, (256 << 20) // head_bytes_over_all_rows(call.shape, call.topology))
    heads = min(in_bytes, max_heads(call.shape, call.topology, "a2a"))
    name = "heads_per_round" if call.intra == "a2a" else "a2a_backward_heads"
    return replace(call, **{name: heads}) if getattr(call, name) else call


def _left_bytes(call: AttentionCall) -> int:
    """What forward leaves for backward, beside Q, K and V, which the benchmark holds."""
    if call.intra != "a2a" or call.resends:
        return calls.left_bytes(call)
    shape = call.shape.replicated(call.mode_topology.intra_size)
    return a2a_pass_bytes(shape)[Direction.FORWARD][0]


def _call(row: Row, hardware: Hardware) -> AttentionCall:
    """The call of a row, with the choices open that the row leaves open."""
    mode = row.mode if row.impl == "burst" else "auto"
    (impl,) = impls_of((f"burst:{mode}",))
    shape = AttentionShape(
        row.batch, row.seq // row.ranks, row.heads_q, row.heads_kv,
        row.head_dim_qk, row.head_dim_v, 2, 4, 4,
    )  # fmt: skip
    kernel = Kernel(multiprocessors=hardware.gpu.multiprocessors)
    nodes, mask = pretend_nodes(row.ranks, row.nodes), MASKS[row.mask]
    spec = spec_of(impl.config, nodes, shape, Layout.ZIGZAG, mask, kernel)
    spec = replace(
        spec, resends=spec.resends or "" < row.date < _AGAIN_BEFORE,  # none: yet to be measured
        saves_remote=False if "" < row.date < _RESENT_BEFORE else spec.saves_remote,
    )  # fmt: skip
    call = AttentionCall(**vars(spec), overlap=impl.config.overlap)
    if impl.config.backend != "auto":
        return calls.run_by(call, impl.config.backend)
    call = calls.by_auto(call, hardware)
    changed = not call.kernel.rectangular_causal and resolved(call).a2a_backward_heads
    if not changed or not "" < row.date < _BOTH_BEFORE:
        return call
    few = row.date < _WHOLE_BEFORE or call.shape.tokens < 1 << 12
    return replace(call, intra="gather" if few else "a2a")


def _with_links(row: Row, hardware: Hardware, call: AttentionCall) -> Hardware:
    """The hardware with the links between nodes that the row's run measured, each rank sending."""
    measured = _LINK.match(row.link)
    if not measured:
        return hardware
    over_all = call.intra == "a2a" and call.mode_topology.spans_nodes
    gbs, own = float(measured[2 if over_all else 1]), row.ranks // row.nodes
    nics = own
    if measured[3]:  # sockets share its cores: a rank that sends alone has the others' part too
        gbs, nics = gbs * own, 1
    inter = LinkSpeed(hardware.links.inter.latency_us, Curve(((1.0, gbs),)))
    node = replace(hardware.node, gpus=own, nics=nics)
    return replace(hardware, links=replace(hardware.links, inter=inter), node=node)


def _passes(row: Row) -> tuple[Direction, ...]:
    """The passes whose times a row adds up."""
    return tuple(Direction) if row.pass_ == "fwd_bwd" else (Direction.FORWARD,)


def _of_kernel(row: Row, hardware: Hardware, sample: Sample | None = None) -> Prediction:
    """The kernel alone: the whole sequence, or its documents, 1/P of the heads."""
    call = _call(row, hardware)
    own = row.heads_q // row.ranks, max(1, row.heads_kv // row.ranks)
    shape = replace(call.shape, heads_q=own[0], heads_kv=own[1])
    rows = Span(0, row.seq)
    tile = Tile(rows, rows, call.mask)
    work = seconds = 0.0
    for direction in _passes(row):
        work += _tflop(call, direction)
        pauseless = inf if sample else work
        backend = call.backend if row.mode == "auto" else row.mode
        seconds += Timer(hardware, backend, pauseless, sample).tile(tile, shape, direction)
    return Prediction(1e3 * seconds, None)


def _of_packed(row: PackedRow, hardware: Hardware) -> Prediction | None:
    """Documents that follow each other: burst, TransformerEngine's ring, or the kernel alone."""
    kind = row.mask.removesuffix(f"-{row.seed}")
    if kind.startswith(("tree", "window")):
        return None
    sample = Sample.of(lengths_of(kind, row.seq, row.seed, multiple_for(row.ranks)))
    mode, _, layout = row.mode.partition("@")
    row = replace(row, mask="causal", mode=mode)
    if row.impl == "ceiling":
        return _of_kernel(row, hardware, sample)
    packing = Packing(Layout(layout or Layout.DOCUMENTS), sample)
    call = replace(_call(row, hardware), layout=packing.layout, mask=Mask(right=0, documents=True))
    call = as_megatron(call, hardware) if is_standin(row) else resolved(call)
    where, padded = _with_links(row, hardware, call), packing.sharded(row.ranks)
    seconds = work = 0.0
    for direction in _passes(row):
        work += row.area * _tflop(call, direction)
        pauseless = work if is_standin(row) else inf
        seconds += calls.pass_time(call, where, direction, padded, pauseless).seconds
    gib = megatron_bytes(call.shape, packed=True) / GIB if is_standin(row) else None
    return Prediction(1e3 * seconds, gib)


def _of_layers(row: Row, hardware: Hardware) -> Prediction:
    """Layers of Megatron's under recomputation, above weights and their gradients."""
    layers, hidden, ffn = map(int, _LAYERS.match(row.note).groups())
    heads = row.heads_q, row.heads_kv
    model = Model("layers", layers, hidden, *heads, row.head_dim_qk, row.head_dim_v, ffn, vocab=1)
    mode = MODES.get(f"{row.impl}:{row.mode}", Mode(row.impl, row.mode))
    job = Job(model, row.seq, row.ranks, row.ranks // row.nodes, 1, hardware)
    seconds, strategies = 0.0, _strategies(row, layers, mode)
    for share, strategy in strategies:
        opened = open_call(job, strategy)
        call = as_megatron(opened, hardware) if row.impl == "megatron" else resolved(opened)
        links = _with_links(row, hardware, call)
        again = attention_time(call, links, Direction.FORWARD).seconds
        if mode.name == ATTENTION:
            return Prediction(1e3 * layers * again, None)
        on_links = replace(job, hardware=links)
        seconds += share * layers * layer_seconds(on_links, strategy, call)
        if strategy.keep != "none" and "" < row.date < _ENDS_BEFORE:
            flops = 2 * hidden * ffn * (job.seq // strategy.cp)  # of the last product
            seconds += share * layers * Timer(job.hardware).matmul(flops)
        if mode.recompute == "selective":  # attention alone is computed again
            seconds += share * layers * again
    return Prediction(1e3 * seconds, _layer_bytes(job, strategies, mode) / GIB)


def _layer_bytes(job: Job, strategies: list[tuple[float, Strategy]], mode: Mode) -> float:
    """Memory of the layers at its peak, but for the input, which is there before and after."""
    (share, strategy), model = strategies[0], job.model
    memory, tokens = memory_of(job, strategy), job.seq // strategy.cp
    # the first layers keep, and all of them but one wait for the last one's backward
    keepers = min(round(share * model.layers), model.layers - 1) / max(1, model.layers - 1)
    num_bytes = memory.saved + memory.kept * keepers + memory.layer
    num_bytes -= 2 * model.hidden * tokens
    if mode.impl == "megatron" and mode.keep == "all":  # its ring saves a copy of K and V
        num_bytes += model.layers * 2 * model.heads_kv * (model.dim_qk + model.dim_v) * tokens
    if mode.recompute == "selective":  # no lse; values are no copy, and hold all of Q, K, V
        num_bytes -= model.layers * 4 * model.heads_q * tokens
        if model.heads_q != model.heads_kv:
            num_bytes += model.layers * 2 * (model.heads_q + model.heads_kv) * model.dim_qk * tokens
    return num_bytes


def _strategies(row: Row, layers: int, mode: Mode) -> list[tuple[float, Strategy]]:
    """Shares of the layers and how they recompute."""
    recompute = "full" if mode.recompute == "full" else "none"
    intra = "ring" if row.impl == "megatron" else "auto"
    kept = {"keep": mode.keep, "offload": mode.offload}
    one = Strategy(cp=row.ranks, recompute=recompute, intra=intra, **kept)
    if not mode.half_of_layers:
        return [(1.0, one)]
    share = max(1, layers // 2) / layers
    return [(share, one), (1 - share, replace(one, keep="none"))]
