"""Slices of models, and a whole one: which there are, how each is run, a run's row."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.documents import SEED, lengths_of, multiple_for
from benchmarks.facts import now
from benchmarks.sheets import SliceRow
from benchmarks.tables import spread
from megatron_burst.tools.job.model import Model

WARM_UP, STEPS = 1, 5  # steps that do not count, and that do
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, slots=True)
class Slice:
    """A model with few layers, and its sample of documents (`benchmarks.documents`; "": one)."""

    name: str
    seq: int
    layers: int
    hidden: int
    ffn: int
    heads_q: int
    heads_kv: int
    vocab: int
    documents: str = ""

    @property
    def model(self) -> Model:
        dim = self.hidden // self.heads_q
        sizes = self.layers, self.hidden, self.heads_q, self.heads_kv, dim, dim
        return Model(self.name, *sizes, self.ffn, self.vocab)

    def lengths(self, gpus: int) -> tuple[int, ...]:
        """Tokens of each document, which are multiples of what TransformerEngine's THD needs."""
        if not self.documents:
            return (self.seq,)
        return lengths_of(self.documents, self.seq, SEED, multiple_for(gpus))

    @property
    def shape(self) -> list[str]:
        """Megatron's flags of the model and its sample."""
        return f"""
        --num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}
        --num-attention-heads {self.heads_q} --group-query-attention
        --num-query-groups {self.heads_kv} --seq-length {self.seq}
        --max-position-embeddings {self.seq} --vocab-size {self.vocab - 1}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --micro-batch-size 1 --global-batch-size 1 --calculate-per-token-loss
        --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 1
        --tokenizer-type NullTokenizer --split 98,1,1 --use-distributed-optimizer
        """.split()

    def rope(self, gpus: int) -> list[str]:
        """Without TransformerEngine's fused RoPE where its 32-bit offsets would overflow."""
        width = (self.heads_q + 2 * self.heads_kv) * (self.hidden // self.heads_q)
        return ["--no-rope-fusion"] if self.seq * width > gpus << 31 else []

    @property
    def flags(self) -> list[str]:
        """Megatron's, of the model and its training."""
        training = f"--train-iters {WARM_UP + STEPS} --lr 1e-5 --lr-decay-style constant"
        return [*self.shape, *training.split(), "--mock-data", *RECOMPUTE.split()]


_8B = Slice("8b", 1 << 20, 2, 4096, 14336, 32, 8, 128256)
_14B = Slice("14b", 1 << 20, 2, 5120, 13824, 40, 40, 128256)
_LONG = replace(_8B, seq=2 << 20, layers=1)
_SHORT = replace(_8B, seq=512 << 10)  # what 2 GPUs hold
_DEEPER = replace(_8B, name="8b-4-layers", seq=256 << 10, layers=4)
_WHOLE = Slice("tinyllama-1.1b", 128 << 10, 22, 2048, 5632, 32, 4, 32000)  # all its layers
_TINY = Slice("tiny", 256, 2, 64, 128, 4, 2, 128)
_TINY_PACKED = replace(_TINY, name="tiny-packed", documents="drawn")
_PACKED = replace(_8B, name="8b-packed", seq=128 << 10, documents="drawn")
_ONE = replace(_8B, seq=64 << 10)  # what one GPU computes in a second: for smoke.sh
_ONE_PACKED = replace(_PACKED, seq=64 << 10)
_BURST, _LOSS = "--context-parallel-impl burst", "--burst-fused-loss"
_FUSED = "--attention-backend fused"  # TransformerEngine's cuDNN
_CUDNN = f"{_FUSED} --cp-comm-type"  # Megatron with it
_TENSOR = "--context-parallel-size 1 --tensor-model-parallel-size {gpus}"
_RINGS = f"{_BURST} --burst-intra ring"
ABLATION = {  # BurstEngine's, each with one thing more; the last three are alternatives
    "base": f"{_RINGS} --burst-tune force.flat=true,force.circulate=kv",  # one ring of K and V
    "backward": f"{_RINGS} --burst-tune force.flat=true",  # what is fewer bytes circulates
    "nested": _RINGS,  # a ring inside each node, and between them
    "fused-loss": f"{_RINGS} {_LOSS}",
    "half": f"{_RINGS} {_LOSS} --burst-keep half",
    "whole": f"{_RINGS} {_LOSS} --burst-keep all",
    "planned": f"{_RINGS} {_LOSS} --burst-keep auto",  # ours: what fits of attention and modules
}
IMPLS = {
    "burst": f"{_BURST} {_LOSS} --burst-keep all",
    "burst-recompute": f"{_BURST} {_LOSS}",
    "megatron": f"{_CUDNN} p2p {_LOSS}",
    "megatron-a2a": f"{_CUDNN} a2a {_LOSS}",
    "megatron-keep": f"{_CUDNN} p2p {_LOSS} --burst-keep all",
    "megatron-own-loss": f"{_CUDNN} p2p --cross-entropy-loss-fusion",
    "tp": f"{_TENSOR} --sequence-parallel {_FUSED} {_LOSS}",
    "tp-v1": f"{_TENSOR} {_FUSED} {_LOSS}",  # sums over ranks, each with all rows
    **ABLATION,
}
RUNS = (
    (_8B, "burst"), (_8B, "megatron"), (_14B, "burst"), (_14B, "megatron"),
    (_LONG, "burst"), (_LONG, "megatron"), (_8B, "megatron-own-loss"),
    (_DEEPER, "burst"), (_DEEPER, "megatron"), (_DEEPER, "megatron-keep"),
    (_DEEPER, "megatron-own-loss"), (_SHORT, "burst"), (_SHORT, "megatron"),
    (_SHORT, "megatron-keep"), (_PACKED, "megatron"), (_PACKED, "megatron-a2a"),
    (_PACKED, "burst-recompute"), (_PACKED, "burst"), (_WHOLE, "megatron"), (_WHOLE, "burst"),
    (_WHOLE, "megatron-keep"), (_ONE, "burst"), (_ONE, "megatron-keep"),
    (_ONE_PACKED, "burst-recompute"), (_ONE_PACKED, "megatron"),
)  # fmt: skip
# BurstEngine's models at its tokens a GPU, for up to 8: only run if they are named
PER_GPU, STRONG = 32 << 10, 256 << 10
SEEDS = (
    Slice("burstengine-14b", PER_GPU, 2, 5120, 13824, 40, 40, 120000),
    Slice("burstengine-7b", PER_GPU, 2, 4096, 11008, 32, 32, 32000),
)
SEED_RUNS = tuple(
    (replace(what, seq=gpus * PER_GPU), impl)
    for gpus in (1, 2, 4, 8)
    for what in SEEDS
    for impl in ("burst", "megatron", "tp", "tp-v1", *ABLATION)
)
_NO_SEEDS = [impl for impl in IMPLS if impl not in ABLATION and not impl.startswith("tp")]
TINY_RUNS = (
    *((_TINY, impl) for impl in IMPLS), *((_TINY_PACKED, impl) for impl in _NO_SEEDS),
)  # fmt: skip


def flags_of(impl: str, gpus: int) -> list[str]:
    """Megatron's and burst's flags of an implementation on so many GPUs."""
    return IMPLS[impl].format(gpus=gpus).split()


def row_of(what: Slice, impl: str, gpus: int, times: list[float], **others: object) -> SliceRow:
    """A row from the milliseconds of its steps; none: one that failed."""
    sizes = {field.name: getattr(what, field.name) for field in fields(what)[1:]}
    lengths = what.lengths(gpus)
    if what.documents:
        sizes["documents"] = f"{what.documents}-{SEED}: {len(lengths)}"
    if times:
        measured = spread(times)
        per_second = 1e3 / measured["ms"] / gpus
        flops = sum(length * what.model.flops_per_token(length) for length in lengths)
        others |= measured | {"tokens_per_s_per_gpu": what.seq * per_second}
        others |= {"tflops_per_gpu": flops * per_second / 1e12}
    sizes |= {"date": now(), "gpus": gpus, "model": what.name, "impl": impl}
    return SliceRow(**sizes | others)


def beside_megatron(row: SliceRow, before: Sequence[SliceRow]) -> SliceRow:
    """The row with its ratios to Megatron's fastest run of the same slice, if there was one."""
    same = [one for one in before if (one.model, one.seq) == (row.model, row.seq)]
    peers = [one for one in same if one.impl.startswith("megatron") and one.ms]
    if not (peers and row.ms and row.loss):
        return row
    best = min(peers, key=lambda one: one.ms)
    return replace(row, speedup=best.ms / row.ms, loss_difference=row.loss / best.loss - 1)
