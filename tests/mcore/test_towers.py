"""Vision towers whose images are sharded over the context-parallel ranks: `shard_towers`.

Compares loss and every gradient with CP 1, where the tower computes all images. Guards against
images that are counted by several ranks or by none, embeddings in another order, ranks without an
image that do not take part, and towers that would be joined wrongly instead of refused.
"""

import importlib
import importlib.util
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_burst.errors import BurstError
from megatron_burst.mcore.towers import shard_towers, share_images
from megatron_burst.tools import cpu_mode
from tests.mcore import models
from tests.mcore.gpt import Parallel, config_of, loss_and_grads, relative_errors, start, whole_batch
from tests.mcore.lacking import needs
from tests.mcore.test_models import llava, megatrons, mimo
from tests.ranks import preload, run_ranks

pytestmark = [pytest.mark.numeric, needs("model classes")]
ALONE, CP2, CP4 = Parallel(), Parallel(cp=2), Parallel(cp=4)
EXACT = 1e-9
LONG, FEW = 6, 2  # images


def images_of(count: int) -> torch.Tensor:
    """[count, 3, SIDE, SIDE]"""
    generator = torch.Generator().manual_seed(count)
    return torch.rand(count, 3, models.SIDE, models.SIDE, generator=generator).double()


def mimo_logits(count: int):
    """Logits of samples with half of the images each; 3 x 16 of 64 tokens at most."""

    def logits_of(model, batch):
        tokens, width = whole_batch()["tokens"] % models.IMAGE, count // 2 * models.PATCHES
        tokens[:, 8 : 8 + width] = models.IMAGE
        inputs = {"images": {"clip": {"x": images_of(count)}}}
        return model(tokens, whole_batch()["position_ids"], modality_inputs=inputs)[0]

    return logits_of


def llava_logits(count: int):
    """The same; a token stands for an image."""

    def logits_of(model, batch):
        tokens = whole_batch()["tokens"] % models.IMAGE
        width = count // 2
        tokens = tokens[:, : tokens.shape[1] - width * (models.PATCHES - 1)]
        tokens[:, 3 : 3 + width] = models.IMAGE
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(images_of(count), tokens, positions, None)[0]

    return logits_of


CASES = {
    "MimoModel": (mimo, mimo_logits, ["modality_submodules.images.encoders.clip"]),
    # last: its patches stay
    "LLaVAModel": (llava, llava_logits, ["vision_model"]),
}


def compare_models(rank: int) -> dict:
    """By model, ranks and images: towers, errors, and images that this rank's tower computed."""
    from megatron_burst import burst_spec

    found = {}
    with ExitStack() as stack:
        for patch in models.stand_ins():
            stack.enter_context(patch)
        start(ALONE)
        truths = {
            (name, count): loss_and_grads(build(ALONE, megatrons), logits_of(count))
            for name, (build, logits_of, _) in CASES.items() for count in (FEW, LONG)
        }  # fmt: skip
        for parallel in (CP2, CP4):
            start(parallel)
            for name, count in truths:
                build, logits_of, paths = CASES[name]
                model = build(parallel, burst_spec)
                assert shard_towers(model) == shard_towers(model) == paths
                counts = seen_by(model.get_submodule(paths[0]))
                run = loss_and_grads(model, logits_of(count))
                errors = relative_errors(run, truths[name, count])
                found[name, parallel.cp, count] = max(errors.values()), counts
    return found


def seen_by(tower: nn.Module) -> list[int]:
    """How many images reach the tower's first layer in each call, to be filled."""
    seen = []
    tower.conv1.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize("count", [FEW, LONG])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_rank(results, name, cp, count):
    """With more images than ranks, and with fewer."""
    for rank, (found, *_) in enumerate(results):
        error, seen = found[name, cp, count]
        own = len(range(rank % cp, count, cp))
        assert seen == [own or 1], "a rank computes its own images, or one whose result is unused"
        assert error <= EXACT


class Patches(nn.Module):
    """A tower of patches and grids, which attends within frames and merges four patches into a row;
    also returns a second list of rows, as towers with deepstack do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.merge, self.deep = nn.Linear(6, 8), nn.Linear(32, 4), nn.Linear(32, 3)
        self.double()
        self.seen = []

    def forward(self, hidden_states, grid_thw):
        self.seen += grid_thw.tolist()
        x = self.embed(hidden_states)
        frames = x.split((grid_thw[:, 1:].prod(1)).repeat_interleave(grid_thw[:, 0]).tolist())
        x = torch.cat([(y @ y.T).softmax(-1) @ y for y in frames]).view(-1, 32)
        return self.merge(x), [self.deep(x)]


class Model(nn.Module):
    """A tower, and a language model of which each rank has other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Patches()

    def loss(self, pixels, grid, rank: int, ranks: int) -> torch.Tensor:
        rows, (deep,) = self.visual(pixels, grid_thw=grid)
        weights = torch.arange(rows.numel()).view_as(rows).sin()
        loss = (rows * weights)[rank::ranks].sum()
        return loss + deep.sin().sum() if rank == 0 else loss  # others do without deepstack


GRIDS = {
    "more images than ranks": [[1, 2, 2], [1, 4, 4], [2, 2, 4], [1, 2, 6], [1, 4, 2], [1, 2, 2]],
    "fewer": [[2, 2, 2], [1, 4, 4]],
    "one video": [[7, 2, 4]],
}
OWN = {  # by frame or not: the largest first, each to the first rank with the fewest patches
    ("more images than ranks", False): [[1], [2], [3, 5], [0, 4]],
    ("fewer", False): [[1], [0], [], []],
    ("one video", False): [[0], [], [], []],
    ("one video", True): [[0, 4], [1, 5], [2, 6], [3]],
}


def packed(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor(GRIDS[name])
    generator = torch.Generator().manual_seed(3)
    shape = int(grid.prod(1).sum()), 6
    return torch.rand(shape, generator=generator, dtype=torch.float64), grid


def gradients(model: Model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def whole(name: str, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the sum of all ranks' losses, and the tower's rows, without sharding."""
    model = Model()
    sum(model.loss(*packed(name), rank, ranks) for rank in range(ranks)).backward()
    return gradients(model), model.visual(*packed(name))[0].detach()


def compare_patches(rank: int) -> dict:
    """By case: errors of rows and of summed gradients, and images that the tower computed."""
    start(CP4)
    found = {}
    for name, by_frame in OWN:
        truth, rows = whole(name, 4)
        model = Model()
        assert shard_towers([model], by_frame=by_frame) == ["visual"]
        model.loss(*packed(name), rank, 4).backward()
        grad, seen = gradients(model), list(model.visual.seen)
        dist.all_reduce(grad)
        with torch.no_grad():
            got = model.visual(*packed(name))[0]
        found[name, by_frame] = (
            float((got - rows).abs().max()), float((grad - truth).abs().max()), seen
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name, by_frame", OWN)
def test_patches_with_grids(results, name, by_frame):
    """Also where a rank's layers use a part of what the tower returns."""
    grids = [[1, *size] for count, *size in GRIDS[name] for _ in range(count)]
    grids = grids if by_frame else GRIDS[name]
    smallest = min(grids, key=lambda grid: torch.tensor(grid).prod())
    for rank, (_, found, *_) in enumerate(results):
        *errors, seen = found[name, by_frame]
        own = [grids[image] for image in OWN[name, by_frame][rank]]
        assert seen == (own or [smallest])
        assert max(errors) <= EXACT


QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4}
QWENS = {  # transformers' towers that attend within frames; module, class, sizes
    "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel", {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"hidden_size": 32, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
         "intermediate_size": 64},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionModel",
        {"hidden_size": 32, "out_hidden_size": 64, "num_position_embeddings": 16,
         "deepstack_visual_indexes": [0], "intermediate_size": 64},
    ),
}  # fmt: skip
FRAMES = [[1, 8, 8], [3, 4, 8], [1, 4, 4], [2, 8, 4]]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
if HAS_TRANSFORMERS:
    preload(*(f"transformers.models.{name}.modeling_{name}" for name in QWENS))


def compare_qwens(rank: int) -> dict[str, float]:
    """By tower, the error of outputs and gradients with frames on four ranks."""
    start(CP4)
    return {name: frames_error(name, rank) for name in QWENS if HAS_TRANSFORMERS}


def frames_error(name: str, rank: int) -> float:
    tower = qwen_tower(name)
    grid, generator = torch.tensor(FRAMES), torch.Generator().manual_seed(9)
    shape = int(grid.prod(1).sum()), 3 * 2 * 4 * 4
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    runs = []
    for step in (1, 4):  # all rows on one rank, then every fourth
        if step == 4:
            shard_towers(nn.ModuleDict({"visual": tower}), by_frame=True)
        tower.zero_grad()
        rows = tree_leaves(tower(pixels, grid_thw=grid))
        first = rank if step == 4 else 0
        sum((x * x.detach().cos())[first::step].sum() for x in rows).backward()
        grads = [x.grad for x in tower.parameters() if x.grad is not None]
        runs.append([torch.cat([x.detach().flatten() for x in pair]) for pair in (rows, grads)])
    (truth, grads), (got, parts) = runs
    dist.all_reduce(parts)
    return max(float((got - truth).abs().max()), float((parts - grads).abs().max() / grads.max()))


def qwen_tower(name: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind, sizes = QWENS[name]
    kind = getattr(module, kind)
    torch.manual_seed(6)
    return kind._from_config(kind.config_class(**QWEN, **sizes)).double()


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("name", QWENS)
def test_frames_of_transformers_towers(results, name):
    assert max(errors[name] for _, _, errors, *_ in results) <= EXACT


def test_images_are_shared_by_their_patches():
    assert share_images([4, 16, 16, 12, 8, 4], 4) == [[1], [2], [3, 5], [0, 4]]
    assert share_images([1] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert share_images([], 2) == [[], []]


class Returned(nn.Module):
    """A tower that returns what a function makes of its input."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x, grid=None, sizes=None, more=None):
        return self.make(x)


def same(x):
    return x


REFUSED = {  # what the tower returns, how it is called, and what the error says
    "packed images": (same, dict(x=torch.ones(1, 8, 4), sizes=torch.ones(2, 2)), "its inputs"),
    "sizes as a list": (same, dict(x=torch.ones(2, 3, 4, 4), sizes=[(4, 4)] * 2), "list"),
    "videos": (same, dict(x=torch.ones(2, 2, 3, 4, 4)), "its inputs"),
    "another grid": (same, dict(x=torch.ones(8, 4), grid=torch.ones(1, 3).long()), "its inputs"),
    "rows first": (lambda x: torch.ones(16, len(x), 4), dict(x=torch.ones(4, 3, 4, 4)), "return"),
    "a number": (lambda x: 1, dict(x=torch.ones(4, 3, 4, 4)), "return"),
    "one sequence": (
        lambda x: x[None],
        dict(x=torch.ones(8, 4), grid=torch.tensor([[1, 2, 2]] * 2)),
        "return",
    ),
}


def refusals(rank: int) -> dict[str, str]:
    """What is said of calls, by case; of models; and of ranks with different images."""
    start(CP2)
    texts = {}

    def catch(name, call, *args, **options):
        with pytest.raises(BurstError) as error:
            call(*args, **options)
        texts[name] = str(error.value)

    for name, (make, call, _) in REFUSED.items():
        model = nn.ModuleDict({"vision_tower": Returned(make)})
        shard_towers(model)
        catch(name, model["vision_tower"], **call)
    catch("no tower", shard_towers, nn.Linear(2, 2))
    model = Model()
    model.config = type("Config", (), {"vision_dp_when_cp": True})()
    catch("sharded already", shard_towers, model)
    model = Model()
    shard_towers(model)
    pixels, grid = packed("fewer")
    catch("other images", model.visual, pixels + rank, grid)
    return texts


def rebound(rank: int) -> bool:
    """Whether a tower computes all images once the model's group is this rank alone, as
    Megatron-Bridge sets it for an evaluation of other samples on each rank."""
    from megatron_burst.mcore.packed import group_of_one

    start(CP2)
    model, (pixels, grid) = Model(), packed("fewer")
    model.pg_collection = SimpleNamespace(cp=parallel_state.get_context_parallel_group())
    shard_towers(model)
    model.pg_collection.cp = group_of_one()
    ours = tree_leaves(model.visual(pixels + rank, grid))
    theirs = tree_leaves(type(model.visual).forward(model.visual, pixels + rank, grid))
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_the_models_group_counts_in_each_call(results):
    assert all(is_whole for *_, is_whole, _ in results)


def test_what_is_refused(results):
    for *_, texts in results:
        for name, (_, _, words) in REFUSED.items():
            assert words in texts[name] and texts[name].count("; ") == 2, texts[name]
        assert "must have a vision tower" in texts["no tower"]
        assert "vision_dp_when_cp" in texts["sharded already"]
        assert "sum of pixels" in texts["other images"]


def overlapped(rank: int) -> float:
    """Error of the gradients that Megatron's DDP reduces while backward runs."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    start(CP4)
    cpu_mode.install()
    options = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = Model()
    ddp = DistributedDataParallel(config_of(CP4), options, model)
    assert shard_towers(ddp) == ["module.visual"]
    for _ in range(2):  # the second fails if a parameter got no gradient
        ddp.zero_grad_buffer()
        model.loss(*packed("fewer"), rank, 4).backward()
        ddp.finish_grad_sync()
    grad = torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()])
    truth, _ = whole("fewer", 4)
    return float((grad * 4 - truth).abs().max())  # DDP averages


def test_ddp_reduces_gradients_of_ranks_without_an_image(results):
    assert max(error for *_, error, _, _ in results) <= EXACT


def run_all(rank: int) -> tuple[dict, dict, dict, float, bool, dict]:
    """All of the above; refusals last, since ranks with different images end the group."""
    compared = compare_models(rank), compare_patches(rank), compare_qwens(rank)
    return *compared, overlapped(rank), rebound(rank), refusals(rank)


@pytest.fixture(scope="module")
def results(once):
    return once(computed)


def computed():
    return run_ranks(run_all, 4)
