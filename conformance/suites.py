"""Which programs of peers are run, which of their cases are left out, and why: one table."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TE, MEGATRON = "TE", "MEGATRON_LM"  # the variables that name the checkouts

# What the suites were written for: where to get them.
PINNED = {
    TE: "git clone https://github.com/NVIDIA/TransformerEngine (tests of d0067d0da, the CP tests "
    "of 2.20; TransformerEngine 2.20.2 installed)",
    MEGATRON: "git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """Values of a parameter that are left out before cases are made of them."""

    argument: str
    values: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Cases that are left out.

    Attributes:
        case: a regular expression that is searched in `Class::test[parameters]`.
        reason: why.
        ranks: leave them out only where there are fewer; 0: always.
        on_cpu: leave them out only where there is no GPU.
    """

    case: str
    reason: str
    ranks: int = 0
    on_cpu: bool = False

    def holds(self, case: str, ranks: int, on_cpu: bool) -> bool:
        """Whether a case is left out with this many ranks."""
        asked = (not self.ranks or ranks < self.ranks) and (on_cpu or not self.on_cpu)
        return asked and bool(re.search(self.case, case))


@dataclass(frozen=True, slots=True)
class Suite:
    """One program.

    Attributes:
        name: short, for the table.
        checkout: which one it is in, or needs: `TE` or `MEGATRON`.
        path: below the checkout; of our own cells below the repository.
        launch: "pytest": one process, which starts others if it needs them; "torchrun": pytest
            under torchrun on all GPUs, at most `ranks`; "script": the file itself under torchrun.
        limit_s: seconds for all of it.
        case_s: seconds without an outcome after which it counts as hung.
        ranks: processes of torchrun.
        needs_gpu: whether nothing of it runs on a CPU.
        attends: whether it runs attention, which then must have been burst's.
        last: regular expressions of cases that come after the others, being slow or like them.
        environment: variables.
    """

    name: str
    checkout: str
    path: str
    launch: Literal["pytest", "torchrun", "script"]
    limit_s: int = 600
    case_s: int = 180
    ranks: int = 2
    needs_gpu: bool = True
    attends: bool = True
    axes: tuple[Axis, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    last: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether the file is ours: cells that the peer's program leaves out."""
        return self.path.startswith("conformance/")

    def why_left_out(self, case: str, ranks: int, on_cpu: bool) -> str | None:
        """Why a case is left out; None if it runs."""
        rows = (row.reason for row in self.exclusions if row.holds(case, ranks, on_cpu))
        return next(rows, None)

    def is_last(self, case: str) -> int:
        """The number of the expression that puts a case behind others; 0: none."""
        return sum(bool(re.search(pattern, case)) << i for i, pattern in enumerate(self.last))


_FP8_ONLY = "only fp8 attention has this switch: TransformerEngine skips the others itself"
_FUSED_AXES = (
    Axis("dtype", ("fp8",), "burst has no fp8 attention"),
    Axis("fp8_bwd", (True,), _FP8_ONLY),
    Axis("fp8_mha", (True,), _FP8_ONLY),
    Axis("fp8_dpa", (True,), _FP8_ONLY),
    Axis("scaling_mode", ("delayed", "current", "mxfp8"), _FP8_ONLY),
    Axis("f16_O", (False,), _FP8_ONLY),
    Axis("cp_comm_type", ("a2a+p2p",), "needs 4 GPUs, as two nodes of two"),
    Axis("model", ("cp_1_2", "cp_1_3", "cp_1_4", "cp_2_2", "cp_2_3", "cp_2_4", "cp_2_5", "cp_3_2",
                   "cp_3_3", "cp_3_4"), "burst adds no attention bias"),
    Axis("model", ("cp_1_0", "cp_1_1"), "burst does not track the largest logit"),
    Axis("model", ("cp_4_1", "cp_4_2", "cp_4_3"), "burst has no attention sinks"),
    Axis("model", ("cp_5_0", "cp_5_1"), "TransformerEngine's own run of head dimension 256 needs "
         "a Blackwell server GPU"),
)  # fmt: skip
_FLASH = Exclusion(
    "test_cp_with_flash_attention",
    "TransformerEngine's own run needs FlashAttention 2 or 3 (the package, not torch's)",
)
_EIGHT, _FOUR = "needs 8 ranks", "needs 4 ranks"
_LOGITS = "burst does not track the largest logit, which --qk-clip is about"

# The most telling first.
SUITES = (
    Suite(
        "TE run_attention_with_cp", TE, "tests/pytorch/attention/test_attention_with_cp.py",
        "pytest", axes=_FUSED_AXES, exclusions=(_FLASH,),
        last=("bshd", "fp16", "cp_3_1", "p2p.*cp_3_0"),
        environment=(("NVTE_TEST_ESSENTIAL", "0"),),
    ),
    Suite(
        "TE, windows and documents", TE, "conformance/cells/test_te_cells.py", "pytest",
        last=("bshd", "fp16", "p2p.*cp_3_0|cp_3_0.*p2p"),
        environment=(("NVTE_TEST_ESSENTIAL", "0"),),
    ),
    Suite(
        "TE test_cp_thd_tail_padding", TE, "tests/pytorch/attention/test_cp_thd_tail_padding.py",
        "pytest", exclusions=(Exclusion(r"\[4\]", "needs 4 GPUs", 4),),
    ),
    Suite(
        "TE test_thd_ag_cp", TE, "tests/pytorch/attention/test_thd_ag_cp.py", "script",
    ),
    Suite(
        "Megatron test_attention", MEGATRON, "tests/unit_tests/transformer/test_attention.py",
        "torchrun", attends=False,  # with two ranks only constructors are left
        exclusions=(
            Exclusion("TestClipQK::test_clip_qk_(?!disabled)", _LOGITS),
            Exclusion("TestParallelAttention::test_(gpu|fused|checkpointed)",
                      "a dense padding mask, which burst refuses: packed samples may be padded"),
            Exclusion("TestSelfAttention::", _EIGHT, 8),
            Exclusion("test_parallel_attention_correctness", _FOUR, 4),
        ),
    ),
    Suite(
        "Megatron's attention, THD at CP 2", MEGATRON, "conformance/cells/test_megatron_at_two.py",
        "torchrun",
    ),
    Suite(
        "Megatron test_multi_token_prediction", MEGATRON,
        "tests/unit_tests/transformer/test_multi_token_prediction.py", "torchrun",
        exclusions=(
            Exclusion(r"test_constructor_local\[2", "needs Apex: torch's norm has no sequence "
                      "parallelism"),
            Exclusion(r"mamba(\[|$)", "needs mamba-ssm, which is built from source"),
            Exclusion(r"\[(2-4|4-2)", _EIGHT, 8),
            Exclusion(r"\[(2-2|1-4|4-1|4\])", _FOUR, 4),
        ),
    ),
    Suite(
        "Megatron test_thd_correctness", MEGATRON,
        "tests/unit_tests/transformer/test_thd_correctness.py", "torchrun",
        attends=False,
        exclusions=(
            Exclusion(r"\[(b1_|varlen_mixed|short_seqs\]|b2_long_8k)",
                      "its layers have a mock in the place of attention"),
            Exclusion("tp2_cp4_sp", _EIGHT, 8),
            Exclusion("tp2_cp2_sp_longseq|short_seqs_parallel|extreme_mixed|long_short_mix",
                      _FOUR, 4),
        ),
    ),
    Suite(
        "Megatron test_transformer_block", MEGATRON,
        "tests/unit_tests/transformer/test_transformer_block.py", "torchrun",
        exclusions=(
            Exclusion("TestProcessGroup|TestMixedProcessGroups", _EIGHT, 8),
            Exclusion("test_layout_layer_number", _FOUR, 4),
        ),
    ),
    Suite(
        "Megatron test_get_batch", MEGATRON, "tests/unit_tests/data/test_get_batch.py", "torchrun",
        needs_gpu=False, attends=False,
        exclusions=(
            Exclusion(r"test_sft_batch\[\d+-[24]", "its documents are not padded for two ranks: "
                      "burst's rows of a rank, which take TransformerEngine's place, refuse them",
                      on_cpu=True),
            Exclusion(r"test_pretrain_batch\[\d+-True", "asks the loader for a dense mask, which "
                      "burst has it leave out"),
        ),
    ),
    Suite(
        "Megatron test_cross_entropy", MEGATRON,
        "tests/unit_tests/tensor_parallel/test_cross_entropy.py", "torchrun",
        needs_gpu=False, attends=False,
        exclusions=(Exclusion("test_vocab_parallel_cross_entropy$", _EIGHT, 8),),
    ),
    Suite(
        "TE test_cp_utils", TE, "tests/pytorch/attention/test_cp_utils.py", "pytest",
        needs_gpu=False, attends=False,
    ),
)  # fmt: skip


def named(words: tuple[str, ...]) -> Iterator[Suite]:
    """Suites with any of these words in their names; all without words."""
    return (s for s in SUITES if not words or any(w.lower() in s.name.lower() for w in words))
