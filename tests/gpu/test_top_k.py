"""Log-probabilities of several classes, a teacher's top k and rows that ranks share, on GPUs.

Guards against what CPU processes cannot show: compiled kernels that write past a tile, broadcasts
and reductions of NCCL that are read before they arrive, calls that wait for the GPU although they
need not, and memory.
"""

from functools import partial

import pytest
import torch

from megatron_burst import (
    class_log_probs,
    count_supervised,
    distillation_loss,
    linear_cross_entropy,
    token_log_probs,
    top_k_kl,
    top_k_log_probs,
)
from tests.gpu import needs_gpus
from tests.loss import test_rows, test_top_k
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, needs_gpus()]
LARGE = 32 << 10, 4096, 152_064  # tokens, width, classes
K = 64


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_cases_are_those_of_the_definition(size):
    wrong = run_ranks(test_top_k.excesses, size, size, "cuda", 60, backend="nccl")
    assert wrong == [[]] * size
    for function in (test_top_k.tops, test_top_k.distilled):
        assert run_ranks(function, size, size, "cuda", backend="nccl") == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_the_tokens_of_one_block(size):
    for found in run_ranks(test_rows.uneven, size, size, "cuda", backend="nccl"):
        for grads, errors, more in found:
            assert max(errors) < 1e-12 and 0 <= more < size, (grads, errors, more)


def large() -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a weight of the issue's size, in bf16."""
    torch.manual_seed(0)
    tokens, width, classes = LARGE
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16) * 0.02
    return hidden.requires_grad_(), weight.requires_grad_()


def peak_gib(run) -> float:
    """Memory on top of what was there, after a first call that compiles."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        peak = torch.cuda.max_memory_allocated() - before
    return peak / 2**30


def test_distillation_needs_one_gib_beyond_inputs_and_gradients():
    hidden, weight = large()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    teachers = hidden.detach() + 0.1 * torch.randn_like(hidden)
    top = top_k_log_probs(teachers, weight, K, entropy=True)
    extra = peak_gib(lambda: top_k_log_probs(teachers, weight, K, entropy=True))
    print(f"a teacher's top {K}: {extra:.3f} GiB")
    assert extra <= 1

    def distil() -> None:
        weight.grad_added_to_main_grad, hidden.grad = False, None
        student = class_log_probs(hidden, weight, top.ids, entropy=True)
        (top_k_kl(student, top).mean() - 0.01 * student.entropy.mean()).backward()

    def distil_at_once() -> None:
        weight.grad_added_to_main_grad, hidden.grad = False, None
        distillation_loss(hidden, weight, top).backward()

    # as with the loss, a second float32 gradient of the weight
    extra = peak_gib(distil_at_once) - (hidden.nbytes + weight.main_grad.nbytes) / 2**30
    print(f"the same with gradients in forward: {extra:.3f} GiB")
    assert extra <= 1
    extra = peak_gib(distil) - hidden.nbytes / 2**30
    print(f"a student's loss and gradients: {extra:.3f} GiB")
    assert extra <= 1 and hidden.grad.isfinite().all() and weight.main_grad.isfinite().all()


def test_only_a_count_that_was_not_announced_waits_for_the_gpu():
    hidden, weight = (torch.randn(n, 64, device="cuda").requires_grad_() for n in (512, 1000))
    labels = torch.randint(0, 1000, (512,), device="cuda")
    mask = (torch.rand(512, device="cuda") < 0.1).float()
    count = count_supervised(labels, mask)
    ids = torch.rand(512, 1000, device="cuda").topk(8).indices
    calls = {
        "tokens": partial(token_log_probs, hidden, weight, labels, loss_mask=mask),
        "classes": partial(class_log_probs, hidden, weight, ids, loss_mask=mask),
        "top": partial(top_k_log_probs, hidden, weight, 8, loss_mask=mask),
        "loss": partial(linear_cross_entropy, hidden, weight, labels, loss_mask=mask),
    }
    values = {}
    for name, call in calls.items():
        for supervised in (count, "all", "count"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if supervised != "count" else "default")
            try:
                found = call(supervised=supervised)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found = found if name == "loss" else found[1 if name in ("classes", "top") else 0]
            values[name, str(supervised)[:3]] = found
        first, *others = (x for (of, _), x in values.items() if of == name)
        assert all(torch.allclose(first, x, atol=1e-5) for x in others), name
    top, labels = top_k_log_probs(hidden, weight, 8, loss_mask=mask), labels.where(mask > 0, -100)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        distillation_loss(hidden, weight, top, supervised=count).backward()
        student = class_log_probs(hidden, weight, top.ids, supervised=count)
        top_k_kl(student, top).sum().backward()
        linear_cross_entropy(hidden, weight, labels, supervised=count).backward()
        with pytest.raises(RuntimeError, match="synchroniz"):
            calls["tokens"](supervised="count")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_id_named_twice_or_out_of_range_makes_its_token_nan():
    hidden, weight = (torch.randn(n, 64, device="cuda").requires_grad_() for n in (4, 100))
    ids = torch.tensor([[1, 2], [3, 3], [5, 100], [7, -100]], device="cuda")
    found = class_log_probs(hidden, weight, ids)
    assert found.rest.isnan().tolist() == [False, True, True, False]
    found.rest.sum().backward()
    assert hidden.grad.isnan().any(1).tolist() == [False, True, True, False]
