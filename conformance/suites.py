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
    """Values of a parameter that are left out before cases are made of them; `ranks` as in
    `Exclusion`."""

    argument: str
    values: tuple[object, ...]
    reason: str
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Cases that are left out.

    Attributes:
        case: a regular expression that is searched in `Class::test[parameters]`.
        reason: why.
        ranks: leave them out only in a run with this many; 0: in every run.
        on_cpu: leave them out only where there is no GPU.
    """

    case: str
    reason: str
    ranks: int = 0
    on_cpu: bool = False

    def holds(self, case: str, ranks: int, on_cpu: bool) -> bool:
        """Whether a case is left out with this many ranks."""
        asked = self.ranks in (0, ranks) and (on_cpu or not self.on_cpu)
        return asked and bool(re.search(self.case, case))


@dataclass(frozen=True, slots=True)
class Suite:
    """One program.

    Attributes:
        name: short, for the table.
        checkout: which one it is in, or needs: `TE` or `MEGATRON`.
        path: below the checkout; of our own cells below the repository.
        launch: "pytest": one process, which starts others if it needs them; "torchrun": pytest
            under torchrun; "script": the file itself under torchrun.
        ranks: numbers of ranks that it is run with.
        limit_s: seconds for all of it.
        case_s: seconds without an outcome after which it counts as hung.
        needs_gpu: whether nothing of it runs on a CPU.
        attends: with how many ranks it runs attention, which then must have been burst's.
        last: regular expressions of cases that come after the others, being slow or like them.
        environment: variables.
    """

    name: str
    checkout: str
    path: str
    launch: Literal["pytest", "torchrun", "script"]
    ranks: tuple[int, ...] = (2, 4)
    limit_s: int = 600
    case_s: int = 180
    needs_gpu: bool = True
    attends: tuple[int, ...] = (2, 4)
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

    def turn(self, case: str, ranks: int, on_cpu: bool) -> tuple[bool, int]:
        """Sorts cases: first those that only this many ranks can run, then by `last`."""
        can_two = ranks == 2 or self.why_left_out(case, 2, on_cpu) is None
        late = sum(bool(re.search(pattern, case)) << i for i, pattern in enumerate(self.last))
        return can_two, late


_FP8_ONLY = "only fp8 attention has this switch: TransformerEngine skips the others itself"
_TWO = "always has 2 ranks"
_FUSED_AXES = (
    Axis("dtype", ("fp8",), "burst has no fp8 attention"),
    Axis("fp8_bwd", (True,), _FP8_ONLY),
    Axis("fp8_mha", (True,), _FP8_ONLY),
    Axis("fp8_dpa", (True,), _FP8_ONLY),
    Axis("scaling_mode", ("delayed", "current", "mxfp8"), _FP8_ONLY),
    Axis("f16_O", (False,), _FP8_ONLY),
    Axis("cp_comm_type", ("a2a+p2p",), "needs 4 ranks", ranks=2),
    Axis("cp_comm_type", ("p2p", "all_gather", "a2a"), _TWO, ranks=4),
    Axis("model", ("cp_1_2", "cp_1_3", "cp_1_4", "cp_2_2", "cp_2_3", "cp_2_4", "cp_2_5", "cp_3_2",
                   "cp_3_3", "cp_3_4"), "burst adds no attention bias"),
    Axis("model", ("cp_5_0", "cp_5_1"), "TransformerEngine's own run of head dimension 256 needs "
         "a Blackwell server GPU"),
)  # fmt: skip
_FLASH = Exclusion(
    "test_cp_with_flash_attention",
    "TransformerEngine's own run needs FlashAttention 2 or 3 (the package, not torch's)",
)
_EIGHT, _FOUR = "needs 8 ranks", "needs 4 ranks"
# Processes that share GPUs take longer than TransformerEngine allows.
_TE_ENVIRONMENT = (("NVTE_TEST_ESSENTIAL", "0"), ("NVTE_CP_POOL_TIMEOUT_SEC", "170"))

# The most telling first.
SUITES = (
    Suite(
        "TE run_attention_with_cp", TE, "tests/pytorch/attention/test_attention_with_cp.py",
        "pytest", axes=_FUSED_AXES, exclusions=(_FLASH,),
        last=("bshd", "fp16", "cp_3_1", "p2p.*cp_3_0"),
        environment=_TE_ENVIRONMENT,
    ),
    Suite(
        "TE, windows and documents", TE, "conformance/cells/test_te_cells.py", "pytest",
        last=("bshd", "fp16", "p2p.*cp_3_0|cp_3_0.*p2p"),
        environment=_TE_ENVIRONMENT,
    ),
    Suite(
        "TE test_cp_thd_tail_padding", TE, "tests/pytorch/attention/test_cp_thd_tail_padding.py",
        "pytest", exclusions=(Exclusion(r"\[4\]", _FOUR, 2), Exclusion(r"\[2\]", _TWO, 4)),
    ),
    Suite(
        "TE test_thd_ag_cp", TE, "tests/pytorch/attention/test_thd_ag_cp.py", "script", ranks=(2,),
    ),
    Suite(
        "Megatron test_attention", MEGATRON, "tests/unit_tests/transformer/test_attention.py",
        "torchrun", attends=(4,),  # with two ranks only constructors are left
        exclusions=(
            Exclusion("TestParallelAttention::test_(gpu|fused|checkpointed)",
                      "a dense padding mask, which burst refuses: packed samples may be padded"),
            Exclusion("TestSelfAttention::", _EIGHT),
            Exclusion("test_parallel_attention_correctness", _FOUR, 2),
        ),
        last=(r"-False\]$", "-2-(True|False)-2-", r"\[(True|False-True)",
              "-4-(True|False)-1-|less_than_tp"),  # TP alone
    ),
    Suite(
        "Megatron, THD and attention", MEGATRON, "conformance/cells/test_megatron_cells.py",
        "torchrun", exclusions=(Exclusion("test_attention", "Megatron's own have 4 ranks", 4),),
    ),
    Suite(
        "Megatron test_multi_latent_attention", MEGATRON,
        "tests/unit_tests/transformer/test_multi_latent_attention.py", "torchrun", ranks=(4,),
        exclusions=(Exclusion("^(?!TestContextParallel|test_parallel)", "no context parallelism"),),
        last=(r"\[4-",),
    ),
    Suite(
        "Megatron test_multi_token_prediction", MEGATRON,
        "tests/unit_tests/transformer/test_multi_token_prediction.py", "torchrun",
        exclusions=(
            Exclusion(r"mamba(\[|$)", "needs mamba-ssm, which is built from source"),
            Exclusion(r"\[(2-4|4-2)", _EIGHT),
            Exclusion(r"\[(2-2|1-4|4-1|4\])", _FOUR, 2),
            Exclusion(r"test_packed_sequences\[2-2", "its ranks have the whole sample each: burst "
                      "refuses boundaries that end at a rank's own length", 4),
            Exclusion(r"test_constructor_local\[[24]", "needs Apex: torch's norm has no sequence "
                      "parallelism"),
        ),
    ),
    Suite(
        "Megatron test_thd_correctness", MEGATRON,
        "tests/unit_tests/transformer/test_thd_correctness.py", "torchrun",
        attends=(4,),
        exclusions=(
            Exclusion(r"\[(b1_|varlen_mixed|short_seqs\]|b2_long_8k)",
                      "its layers have a mock in the place of attention"),
            Exclusion("tp2_cp4_sp", _EIGHT),
            Exclusion("tp2_cp2_sp_longseq|short_seqs_parallel|extreme_mixed|long_short_mix",
                      _FOUR, 2),
        ),
    ),
    Suite(
        "Megatron test_transformer_block", MEGATRON,
        "tests/unit_tests/transformer/test_transformer_block.py", "torchrun",
        exclusions=(
            Exclusion("TestProcessGroup|TestMixedProcessGroups", _EIGHT),
            Exclusion("test_layout_layer_number", _FOUR, 2),
        ),
    ),
    Suite(
        "Megatron test_get_batch", MEGATRON, "tests/unit_tests/data/test_get_batch.py", "torchrun",
        needs_gpu=False, attends=(),
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
        needs_gpu=False, attends=(),
        exclusions=(Exclusion("test_vocab_parallel_cross_entropy$", _EIGHT),),
    ),
    Suite(
        "TE test_cp_utils", TE, "tests/pytorch/attention/test_cp_utils.py", "pytest", ranks=(2,),
        needs_gpu=False, attends=(),
    ),
)  # fmt: skip


def named(words: tuple[str, ...]) -> Iterator[Suite]:
    """Suites with any of these words in their names; all without words."""
    return (s for s in SUITES if not words or any(w.lower() in s.name.lower() for w in words))
