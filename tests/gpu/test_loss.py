"""The LM head and loss on GPUs: compiled kernels, GEMMs with float32 sums, memory, NCCL.

Guards against what CPU processes cannot show: cuBLAS calls that round or copy their sums, kernels
that compile to something other than torch's result, a second copy of anything large, and chunks
read before they arrive. Functions take a device, so they also run on a CPU.
"""

from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_burst.loss import passes, statistics, tiles
from megatron_burst.loss.passes import add_product
from megatron_burst.loss.statistics import LossOptions
from megatron_burst.loss.supervised import count_supervised
from tests.gpu import needs_gpus
from tests.gpu.heads import call, exact, fused, off, plain, problem_of
from tests.loss import test_fused
from tests.loss.oracle import PLAIN, relative_error
from tests.loss.test_processes import shard
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(),
]
GRADS = ["recompute", "forward"]
ALL = LossOptions(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, logit_scale=0.7)
HEAD = (4096, 2048, 20_000)  # tokens, width, classes


def errors(device, sizes, grads, chunk) -> dict:
    """Errors of ours and of the plain computation in bf16."""
    problem = problem_of(device, torch.bfloat16, sizes)
    truth, theirs = exact(problem), plain(problem)
    mine = fused(problem, grads=grads, chunk=chunk)
    return {name: (off(mine[name], x), off(theirs[name], x)) for name, x in truth.items()}


@pytest.mark.parametrize("grads", GRADS)
def test_errors_are_at_most_those_of_plain_bf16(grads, monkeypatch):
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", 64 << 20)  # several tiles of classes
    tokens, width, vocab = HEAD
    chosen = tiles.choose_tiles(tiles.Sizes(tokens, vocab, width, 2), False)
    assert chosen.rows < tokens and chosen.classes < vocab
    found = errors("cuda", HEAD, grads, 2048)
    print(grads, found)
    mean, _ = found.pop("mean")  # a single number: luck dominates
    assert mean < 1e-4
    for name, (mine, theirs) in found.items():
        assert mine <= 1.1 * theirs and mine < 1e-2, (name, found)


def test_kernels_compute_what_plain_torch_does():
    """As tests/loss checks in the interpreter, plus the rows of a large vocabulary."""
    from megatron_burst.loss import fused as kernels

    found = test_fused.comparisons("cuda")
    for dtype, transform in product((torch.bfloat16, torch.float32), test_fused.TRANSFORMS[::2]):
        case = (4, 151_936), dtype, transform, True
        found[str(case)] = test_fused.compare(kernels, "cuda", *case)
    for case, errors in found.items():
        assert errors["statistics"] < 5e-5 and errors["gradient"] < 1e-5, (case, errors)
        assert errors["elsewhere"] == 0, case


def differences(device, dtype, kernels, options, grads) -> dict:
    """Differences between a call with these kernels and one with plain torch."""
    problem, found = problem_of(device, dtype, (512, 256, 10_000), masked=True), []
    for module in (kernels, statistics):
        leaves = problem.leaves()
        with mock.patch.object(passes, "kernels_of", lambda raw, module=module: module):
            loss = call(leaves, options, grads=grads, chunk=200)
            loss.backward()
        found.append({"loss": loss.detach(), "x": leaves.hidden.grad, "w": leaves.weight.grad})
    return {name: relative_error(x, found[1][name]) for name, x in found[0].items()}


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients_are_those_of_the_torch_backend(dtype, tolerance, options):
    from megatron_burst.loss import fused as kernels

    for grads in GRADS:
        found = differences("cuda", dtype, kernels, options, grads)
        assert found["loss"] < 1e-5 and max(found.values()) < tolerance, (grads, found)


def test_cuda_tensors_go_to_the_kernels_except_float64():
    """Otherwise the test above would compare torch with itself."""
    from megatron_burst.loss import fused as kernels

    raw = torch.ones(1, 1, device="cuda")
    assert passes.kernels_of(raw) is kernels and passes.kernels_of(raw.bfloat16()) is kernels
    assert passes.kernels_of(raw.double()) is statistics


def sums_of_products(device, dtype) -> tuple[float, bool]:
    """Error of 32 accumulated products, and whether neighbouring memory is unchanged.

    The first product overwrites NaN.
    """
    generator = torch.Generator(device).manual_seed(3)
    total = torch.ones(1024, 512, device=device)
    total[256:768] = torch.nan
    truth = torch.zeros(512, 512, dtype=torch.float64, device=device)
    for turn in range(32):
        raw, x = (
            torch.randn(384, n, generator=generator, device=device).to(dtype) for n in (512, 512)
        )
        add_product(total[256:768], raw.t(), x, first=turn == 0)
        truth += raw.double().t() @ x.double()
    rest = torch.cat([total[:256], total[768:]])
    return off(total[256:768], truth), bool(rest.eq(1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_added_up_in_float32(dtype):
    """Guards against a GEMM that rounds to 16 bits before it adds (2e-3), or adds to something
    else."""
    error, rest = sums_of_products("cuda", dtype)
    assert error < 1e-4 and rest, error


def main_grad_errors(device, sizes, grads, chunks) -> tuple[list[float], float]:
    """Errors of float32 `main_grad` by chunk size, and of the plain computation's bf16 gradient."""
    problem = problem_of(device, torch.bfloat16, sizes)
    true, found = exact(problem)["weight"], []
    for chunk in chunks:
        leaves = problem.leaves()
        leaves.weight.main_grad = torch.zeros_like(leaves.weight, dtype=torch.float32)
        leaves.weight.grad_added_to_main_grad = False
        loss = call(leaves, grads=grads, chunk=chunk)
        assert not leaves.weight.main_grad.any()
        loss.backward()
        assert leaves.weight.grad_added_to_main_grad
        found.append(off(leaves.weight.main_grad, true))
    return found, off(plain(problem)["weight"], true)


@pytest.mark.parametrize("grads", GRADS)
def test_error_of_main_grad_is_flat_in_the_number_of_chunks(grads):
    found, theirs = main_grad_errors("cuda", HEAD, grads, (4096, 1024, 256))
    print(grads, found, theirs)
    assert max(found) <= 1.05 * min(found) and max(found) <= theirs, (found, theirs)


def extra_bytes(problem, grads) -> int:
    """Memory of a call besides inputs, weight, main_grad and dX."""
    hidden, weight = problem.hidden, problem.weight
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    supervised = count_supervised(problem.labels, problem.loss_mask)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(problem, grads=grads, supervised=supervised).backward()
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes
    print(f"{grads}, {tuple(weight.shape)}: {extra / 2**30:.3f} GiB")
    return extra


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "masked"])
@pytest.mark.parametrize("grads", GRADS)
def test_extra_memory_is_at_most_one_gib(grads, masked):
    """Besides inputs, weight, dX and float32 dW, of which there are two when computed in
    forward."""
    problem = problem_of("cuda", torch.bfloat16, (32 << 10, 4096, 128 << 10), masked).leaves()
    hidden, weight = problem.hidden, problem.weight
    extra = extra_bytes(problem, grads)
    extra -= weight.main_grad.nbytes if grads == "forward" else 0
    assert extra <= 1 << 30, extra
    counts = problem.labels >= 0 if not masked else (problem.labels >= 0) & (problem.loss_mask != 0)
    assert torch.equal(hidden.grad.ne(0).any(-1), counts) and weight.main_grad.isfinite().all()


def test_sums_of_a_small_weight_fit_into_that_gib_too():
    """As with 128K classes at TP 4: the second float32 dW counts."""
    sizes = (32 << 10, 4096, 32 << 10)
    extra = extra_bytes(problem_of("cuda", torch.bfloat16, sizes).leaves(), "forward")
    assert extra <= 1 << 30, extra


@pytest.mark.parametrize("grads", GRADS)
def test_a_label_out_of_range_makes_loss_and_gradients_nan(grads):
    """The CPU does not look at a GPU's labels."""
    problem = problem_of("cuda", torch.bfloat16, (64, 32, 100)).leaves()
    problem.labels[1, 0] = 100
    loss = call(problem, grads=grads)
    loss.backward()
    assert loss.isnan() and problem.weight.grad.isnan().all()
    assert problem.hidden.grad[1, 0].isnan().all()


def over_ranks(rank, device, sizes) -> dict:
    """By case: difference from a single rank, whether two runs are bitwise equal, errors."""
    size, group, found = dist.get_world_size(), dist.group.WORLD, {}
    for dtype, sp, grads in product((torch.float32, torch.bfloat16), (True, False), GRADS):
        problem = problem_of(device, dtype, sizes, masked=True)
        truth, alone = exact(problem), fused(problem, grads=grads)
        part = shard(problem, rank, size, sp)
        runs = []
        for turn in range(2):
            if turn == rank and device == "cuda":
                torch.cuda._sleep(20_000_000)  # ranks must not have to run in step
            supervised = "all"
            if grads == "recompute":
                supervised = count_supervised(
                    part.labels, part.loss_mask, tp_group=group, sequence_parallel=sp
                )
            runs.append(fused(part, grads=grads, tp_group=group, sequence_parallel=sp,
                              chunk=256, supervised=supervised))  # fmt: skip
        for x in (truth, alone):
            x["weight"] = x["weight"].chunk(size)[rank]
            x["hidden"] = x["hidden"].chunk(size)[rank] if sp else x["hidden"]
        found[dtype, sp, grads] = {
            name: (
                relative_error(x, alone[name]), torch.equal(x, runs[1][name]),
                off(x, truth[name]), off(alone[name], truth[name]),
            )
            for name, x in runs[0].items()
        }  # fmt: skip
    return found


def test_two_ranks_compute_what_one_does():
    sizes = (2048, 1024, 8192)
    for rank, found in enumerate(run_ranks(over_ranks, 2, "cuda", sizes, backend="nccl")):
        assert len(found) == 8
        check_over_ranks(rank, found)


def check_over_ranks(rank, found):
    for (dtype, sp, grads), results in found.items():
        for name, (difference, same, several, alone) in results.items():
            case = f"rank {rank} {dtype} {sp=} {grads} {name}: {results[name]}"
            assert same, case
            if dtype is torch.float32:
                assert difference < 1e-5, case
            elif name != "mean":  # partial dX is rounded to bf16 before NCCL adds it up
                assert several <= (1.5 if name == "hidden" else 1.1) * alone, case
