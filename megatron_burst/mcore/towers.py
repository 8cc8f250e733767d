"""Vision towers that compute each image on one context-parallel rank instead of on all.

Megatron's models merge embeddings of images into whole samples and shard those. So every rank
needs all embeddings, but not all images. Megatron-LM #7315 and Megatron-Bridge #5645 do the same
inside single models.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_burst.comm.alone import group_or_default
from megatron_burst.comm.announce import announce, backward_of, reporting_errors
from megatron_burst.errors import Need, require, unmet_needs

WHO = "shard_towers"
_NAMES = ("vision_model", "vision_tower", "visual")  # in LLaVAModel and in Megatron-Bridge
# options with which a model shards images itself, or has another group in each micro-batch
_OTHERS = ("vision_dp_when_cp", "vision_dp_over_cp", "vision_context_parallel",
           "hybrid_context_parallel", "dynamic_context_parallel")  # fmt: skip
_PLAIN = bool | int | float | str | None


def shard_towers(model: nn.Module | Sequence[nn.Module], cp_group: dist.ProcessGroup | None = None,
                 *, by_frame: bool = False) -> list[str]:  # fmt: skip
    """Let each context-parallel rank compute only its images of a micro-batch in vision towers.

    Call it on all ranks once the model is built, before or after it is wrapped in DDP. It replaces
    the `forward` of towers: modules called vision_model, vision_tower or visual, and encoders in
    Mimo's VisionModalitySubmodules. Parameters, their names and checkpoints stay. A second call
    changes nothing.

    A tower is called as before, with the same images on all ranks: either [n, channels, height,
    width], or patches [p, ...] and their grid of integers [n, 3] (frames, height, width). Images
    go to the rank with the fewest patches so far. An all-gather returns what the tower returns,
    tensors [n, ...] or rows [r, h] in any nesting, in the order of the images. Its backward is a
    reduce-scatter, so the sum of a tower's gradients over the ranks is the same as without. A rank
    without an image computes the smallest one, and its gradients are zero.

    Args:
        model: a model, or the chunks of a pipeline stage.
        cp_group: the context-parallel group; None: the model's in each call, which
            Megatron-Bridge swaps for evaluation.
        by_frame: shard the frames of a video too. Only for towers that attend within frames, such
            as those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    Returns:
        paths of the towers in the model.

    Raises:
        BurstError: without a tower, except in pipelines; with options that shard images already.
            In a call of a tower, on all ranks: for other inputs, such as images packed by
            `imgs_sizes`, for other outputs, and if ranks have different images.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    towers = [pair for chunk in chunks for pair in _towers_of(chunk)]
    require(WHO, _of_model(chunks, towers))
    owners = [module for chunk in chunks for module in chunk.modules() if _own_group_of(module)]
    for path, tower in towers:
        if not isinstance(tower.forward, ShardedForward):
            tower.forward = ShardedForward(path, tower.forward, cp_group or owners[:1], by_frame)
    return [path for path, _ in towers]


def _own_group_of(module: nn.Module) -> dist.ProcessGroup | None:
    return getattr(getattr(module, "pg_collection", None), "cp", None)


def _towers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Towers by path, without towers inside of towers."""
    # Mimo warns when it is imported
    from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules

    encoders = {
        id(encoder) for module in model.modules() if isinstance(module, VisionModalitySubmodules)
        for encoder in module.encoders.values()
    }  # fmt: skip
    outer = ""
    for path, module in model.named_modules():
        is_tower = path.rpartition(".")[2] in _NAMES or id(module) in encoders
        if is_tower and not (outer and path.startswith(outer)):
            outer = f"{path}."
            yield path, module


def _of_model(chunks: list[nn.Module], towers: list[tuple[str, nn.Module]]) -> Iterator[Need]:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    yield (towers or stages > 1, "the model must have a vision tower, because its images are "
           "sharded", ", ".join(type(chunk).__name__ for chunk in chunks),
           f"name the tower {', '.join(_NAMES)}, or leave the call out")  # fmt: skip
    for module in (module for chunk in chunks for module in chunk.modules()):
        config = getattr(module, "config", None)
        active = [name for name in _OTHERS if getattr(config, name, False)]
        yield (not active, f"it cannot run with {' '.join(active)}, because all ranks of one group "
               "must have the same images", f"it in {type(module).__name__}",
               "switch that off, or leave the call out")  # fmt: skip


@dataclass(frozen=True)
class Images:
    """The images of a call of a tower."""

    pixels: Tensor  # [n, channels, height, width] or [patches, ...]
    grid: Tensor | None  # [n, 3]
    # of each image along `pixels`, which is what computing it takes too: towers' linear layers take
    # longer than their attention
    sizes: list[int]

    @classmethod
    def of(cls, pixels: Tensor, grid: Tensor | None, by_frame: bool) -> "Images":
        """Those of a tower's inputs, by frame if that is wanted."""
        if grid is None:
            return cls(pixels, None, [1] * len(pixels))
        split = grid
        if by_frame:
            split = grid.repeat_interleave(grid[:, 0], 0)
            split[:, 0] = 1
        return cls(pixels, split, split.prod(1).tolist())

    def select(self, chosen: list[int]) -> tuple[Tensor, Tensor | None]:
        """Inputs with these images only."""
        pieces = self.pixels.split(self.sizes)
        pixels = torch.cat([pieces[image] for image in chosen])
        return pixels, None if self.grid is None else self.grid[chosen]

    def rows_of(self, images: list[int], x: Tensor) -> list[int] | None:
        """How many rows [rows, ...] each image of the call has, from the output for some of them;
        None: it is no whole number, or rows are not those of images."""
        size, rows = sum(self.sizes[image] for image in images), x.shape[0] if x.dim() else 0
        if not rows or (x.dim() > 2 and (self.grid is not None or rows != size)):
            return None
        if rows % size == 0:
            return [count * (rows // size) for count in self.sizes]
        merged = size // rows
        fits = size % rows == 0 and all(count % merged == 0 for count in self.sizes)
        return [count // merged for count in self.sizes] if fits else None


class ShardedForward:
    """The forward of a tower for this rank's images, and for all ranks' embeddings."""

    def __init__(self, path: str, forward: Any, group: dist.ProcessGroup | list[nn.Module],
                 by_frame: bool) -> None:  # fmt: skip
        functools.update_wrapper(self, forward)  # some callers read its signature
        self._who, self._forward, self._by_frame = f"{WHO}, {path}", forward, by_frame
        self._group_or_owner = group

    @property
    def _group(self) -> dist.ProcessGroup:
        """The group that was passed, else that of the module that has one, else Megatron's."""
        if not isinstance(self._group_or_owner, list):
            return self._group_or_owner
        groups = [_own_group_of(module) for module in self._group_or_owner]
        return group_or_default((*groups, parallel_state.get_context_parallel_group())[0], WHO)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The tower's output for all images; see `shard_towers`."""
        group = self._group
        if group.size() == 1:
            return self._forward(*args, **options)
        inputs, images = self._agree((*args, *options.values()), group)
        if not images.sizes:
            return self._forward(*args, **options)
        shares = share_images(images.sizes, group.size())
        own = shares[group.rank()]
        # a rank without an image takes part, for DDP waits for gradients of all parameters
        smallest = min(range(len(images.sizes)), key=images.sizes.__getitem__)
        computed = own or [smallest]
        local = dict(zip(map(id, inputs), images.select(computed), strict=False))
        with reporting_errors(group):
            output = self._forward(
                *(local.get(id(x), x) for x in args),
                **{name: local.get(id(x), x) for name, x in options.items()},
            )
            leaves, spec = tree_flatten(output)
            rows = [images.rows_of(computed, x) if isinstance(x, Tensor) else None for x in leaves]
            require(self._who, _of_outputs(leaves, rows))
        places = [Places(group, shares, counts) for counts in rows]
        shards = [x if own else x[:0] for x in leaves]
        return tree_unflatten(list(_Gathered.apply(places, group, *shards)), spec)

    def _agree(
        self, values: tuple[Any, ...], group: dist.ProcessGroup
    ) -> tuple[list[Tensor], Images]:
        """A call's tensors, pixels first, and its images, once all ranks have the same."""
        inputs = [x for x in values if isinstance(x, Tensor)]
        inputs.sort(key=lambda x: not x.is_floating_point())
        data, images = {}, None  # a problem raises
        problem = unmet_needs(self._who, _of_inputs(inputs, values))
        if not problem:
            pixels, grid = (*inputs, None)[:2]
            images = Images.of(pixels, grid, self._by_frame)
            data = {"shape": str(tuple(pixels.shape)), "patches": str(images.sizes),
                    "sum of pixels": str(float(pixels.detach().double().sum()))}  # fmt: skip
        announce(group, {"tower": self._who}, self._who, problem, data=data)
        return inputs, images


def _of_inputs(tensors: list[Tensor], values: tuple[Any, ...]) -> Iterator[Need]:
    got = ", ".join(
        f"{str(x.dtype)[6:]} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        for x in values
    )
    must = ("its inputs must be images [n, channels, height, width], or patches and their grid "
            "[n, 3], and plain options, because images are sharded one by one")  # fmt: skip
    change = "do not shard this tower"
    yield all(isinstance(x, Tensor | _PLAIN) for x in values), must, got, change
    yield 1 <= len(tensors) <= 2 and tensors[0].is_floating_point(), must, got, change
    if len(tensors) == 1:
        yield tensors[0].dim() == 4, must, got, change
    else:
        pixels, grid = tensors
        is_grid = not grid.is_floating_point() and grid.dim() == 2 and grid.shape[1] == 3
        yield is_grid, must, got, change
        yield int(grid.prod(1).sum()) == len(pixels), must, got, change


def _of_outputs(leaves: list[Any], rows: list[list[int] | None]) -> Iterator[Need]:
    got = ", ".join(
        str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves
    )
    yield (leaves and None not in rows, "it must return tensors [n, ...] of n images, or [rows, h] "
           "with as many rows for each patch, because those of all ranks are joined", got,
           "do not shard this tower")  # fmt: skip


def share_images(sizes: list[int], ranks: int) -> list[list[int]]:
    """Images by rank, so that ranks have about equally much: the largest first, each to the rank
    with the least. Ranks have their images in ascending order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for image in sorted(range(len(sizes)), key=lambda image: -sizes[image]):
        rank = totals.index(min(totals))
        shares[rank].append(image)
        totals[rank] += sizes[image]
    return [sorted(images) for images in shares]


class Places:
    """Where the rows of all images are in what an all-gather of ranks' padded rows returns."""

    def __init__(self, group: dist.ProcessGroup, shares: list[list[int]], rows: list[int]) -> None:
        self._group = group
        self._most = max(sum(rows[image] for image in images) for images in shares)
        self._own = sum(rows[image] for image in shares[group.rank()])
        places: dict[int, Tensor] = {}  # by image
        for rank, images in enumerate(shares):
            start = rank * self._most
            for image in images:
                places[image] = torch.arange(start, start + rows[image])
                start += rows[image]
        self._index = torch.cat([places[image] for image in range(len(rows))])

    def gather(self, x: Tensor) -> Tensor:
        """Rows of all images, from this rank's."""
        padded = x.new_zeros(self._most, *x.shape[1:])
        padded[: self._own] = x
        gathered = x.new_empty(self._group.size() * self._most, *x.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, self._group)
        return gathered.index_select(0, self._index.to(x.device))

    def scatter(self, grad: Tensor) -> Tensor:
        """Gradients of this rank's rows, summed over ranks. Each row is a token of one rank, and
        zero elsewhere, so nothing is rounded."""
        padded = grad.new_zeros(self._group.size() * self._most, *grad.shape[1:])
        padded.index_copy_(0, self._index.to(grad.device), grad)
        summed = grad.new_empty(self._most, *grad.shape[1:])
        dist.reduce_scatter_tensor(summed, padded, group=self._group)
        return summed[: self._own]


class _Gathered(torch.autograd.Function):
    """All that a tower returns, in one function: so ranks run one backward, even if the layers of
    one of them use a part of it only."""

    @staticmethod
    def forward(
        ctx, places: list[Places], group: dist.ProcessGroup, *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.places, ctx.announce = places, backward_of(group)
        return tuple(place.gather(x) for place, x in zip(places, shards, strict=True))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.announce()
        needed = ctx.needs_input_grad[2:]
        return None, None, *(
            place.scatter(grad) if needs_grad else None
            for place, grad, needs_grad in zip(ctx.places, grads, needed, strict=True)
        )  # fmt: skip
