"""Micro-batches of equal work for Megatron's schedules: packs and shards the documents that
`megatron_burst.balance` assigns to this rank."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from megatron_burst.balance import BatchGrid, MicroBatch, Sampler
from megatron_burst.comm.group import state_of
from megatron_burst.comm.store import ParallelKind
from megatron_burst.errors import Need, require, unmet_needs
from megatron_burst.mcore import packed
from megatron_burst.mcore.args import global_args
from megatron_burst.mcore.refusals import names_burst

WHO = "balanced batches"
_JOB = ParallelKind("job's", "rank", "each runs its part of the same steps")
type Batch = dict[str, Any]
type Document = Mapping[str, Tensor]


class BalancedBatches(Iterator[Batch]):
    """This rank's micro-batches, step after step: a data loader for Megatron's
    `--dataloader-type external`.

    Each is what `forward_step` needs, sharded for this context-parallel rank, on its device:
    `tokens`, `labels`, `loss_mask` and `position_ids` [1, rows], and `packed_seq_params` with the
    documents' boundaries and, if the micro-batch has one of its own, the group. A document's last
    token has no next one, so its loss is masked; so is padding.

    Every rank makes one, with the same sampler, in each of its model chunks.
    """

    def __init__(
        self, documents: Sequence[Any], sampler: Sampler, config: TransformerConfig
    ) -> None:
        """Check that ranks go through the same documents, and make groups for micro-batches.

        Args:
            documents: by index, token ids [n], as an array or a tensor; or a mapping of "tokens",
                "labels" and "loss_mask", each [n], such as for supervised fine-tuning.
            sampler: of their lengths.
            config: the model's.

        Raises:
            BurstError: if the job or the model cannot run such batches, or ranks have different
                ones.
        """
        self._documents, self._sampler, self._config = documents, sampler, config
        self._agree(unmet_needs(WHO, self._needs()))
        self._cp_group = parallel_state.get_context_parallel_group()
        self._groups = {
            size: packed.consecutive_part(self._cp_group, size) for size in sorted(sampler.cp_sizes)
        }
        self._queue: deque[MicroBatch] = deque()  # of the current step

    @staticmethod
    def grid(config: TransformerConfig, micro_batches: int, token_limit: int) -> BatchGrid:
        """The grid of this job, for a sampler, once Megatron has made its groups.

        Args:
            config: the model's.
            micro_batches: of a data-parallel rank in a step; Megatron's `get_num_microbatches()`.
            token_limit: tokens of a micro-batch that a rank has memory for: its shard's, not all.
        """
        return BatchGrid(parallel_state.get_data_parallel_world_size(),
                         config.context_parallel_size, micro_batches, token_limit,
                         config.pipeline_model_parallel_size,
                         config.expert_model_parallel_size)  # fmt: skip

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises:
            BurstError: if a document has another length than the sampler was given, or a step does
                not fit.
        """
        if not self._queue:
            ranks = parallel_state.get_data_parallel_rank(), self._cp_group.rank()
            self._queue.extend(next(self._sampler).of_rank(*ranks))
        micro_batch = self._queue.popleft()
        device = torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        documents = [self._read(index) for index in micro_batch.documents]
        return self._packed(documents, micro_batch.cp, device)

    def _read(self, index: int) -> Document:
        """A document with labels and mask."""
        document = self._documents[index]
        has_labels = isinstance(document, Mapping)
        require(WHO, [(
            not has_labels or "cu_seqlens" not in document,
            "a document must not hold other documents, because boundaries inside it would be lost",
            f"document {index} with cu_seqlens, as samples of Megatron's SFTDataset have",
            "pass each conversation as its own document",
        )])  # fmt: skip
        tokens = torch.as_tensor(document["tokens"] if has_labels else document).long()
        if has_labels:
            labels = torch.as_tensor(document["labels"]).long()
            loss_mask = torch.as_tensor(document["loss_mask"]).float()
        else:
            labels, loss_mask = tokens.roll(-1), torch.ones(len(tokens))
            labels[-1:] = loss_mask[-1:] = 0
        rows = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask,
                "position_ids": torch.arange(len(tokens))}  # fmt: skip
        shapes, length = {tuple(x.shape) for x in rows.values()}, self._sampler.lengths[index]
        require(WHO, [(
            shapes == {(length,)},
            "a document must have the length that the sampler was given, because ranks assign "
            "documents by it",
            f"document {index} with shapes {sorted(shapes)}, and a length of {length}",
            "pass the data set's lengths",
        )])  # fmt: skip
        return rows

    def _packed(self, documents: Sequence[Document], cp: int, device: torch.device) -> Batch:
        """This rank's rows of documents that are one after the other, each padded."""
        lengths = torch.tensor([len(document["tokens"]) for document in documents])
        padded = self._padded(lengths, cp)
        starts, ends = (pad(x.cumsum(0), (1, 0)).int() for x in (lengths, padded))
        group, whole, longest = self._groups[cp], int(ends[-1]), int(padded.max())
        rows = packed.partitioned_indices(ends, whole, cp, group.rank()) if cp > 1 else slice(None)
        batch: Batch = {}
        for name in documents[0]:
            flat = torch.zeros(whole, dtype=documents[0][name].dtype)
            for document, start in zip(documents, ends.tolist(), strict=False):
                flat[start : start + len(document[name])] = document[name]
            batch[name] = flat[rows][None].to(device, non_blocking=True)
        starts, ends = starts.to(device), ends.to(device)
        batch["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends, max_seqlen_q=longest, max_seqlen_kv=longest,
            **({} if group is self._cp_group else dict(cp_group=group, local_cp_size=cp)),
        )  # fmt: skip
        return batch

    def _padded(self, lengths: Tensor, cp: int) -> Tensor:
        """Lengths of which each rank has two equal chunks; with sequence parallelism the sum is
        such that tensor-parallel ranks have equally many rows."""
        chunks = 2 * cp if cp > 1 else 1
        padded = -(-lengths // chunks) * chunks
        if self._config.sequence_parallel:
            padded[-1] += -int(padded.sum()) % (chunks * self._config.tensor_model_parallel_size)
        return padded

    def _agree(self, problem: str) -> None:
        """Make sure that all ranks of the job go through the same steps, and that none refuses."""
        sampler = self._sampler
        digest = sha256(sampler.lengths.astype("<i8").tobytes()).hexdigest()[:16]
        terms = {"documents": f"{len(sampler.lengths)} with lengths {digest}",
                 "documents of a step": f"{sampler.documents}"}  # fmt: skip
        names = "grid", "costs", "cp_sizes", "seed", "consumed"
        terms |= {name: f"{getattr(sampler, name)}" for name in names}
        world = dist.group.WORLD
        assert world is not None  # Megatron's groups are parts of it
        state_of(world).consensus.agree(terms, WHO, problem=problem, kind=_JOB)

    def _needs(self) -> Iterable[Need]:
        config, grid, args = self._config, self._sampler.grid, global_args()
        own = self.grid(config, grid.micro_batches, grid.token_limit)
        yield (grid == own, "the sampler's grid must have the job's sizes, because ranks follow it",
               f"{grid} in a job of {own}", "make it with BalancedBatches.grid")  # fmt: skip
        yield (not getattr(args, "use_torch_fsdp2", False),
               "gradients must be divided by the step's number of tokens, because micro-batches "
               "differ in length, but Megatron does not do so under FSDP2", "--use-torch-fsdp2",
               "pass --use-megatron-fsdp, or --use-distributed-optimizer")  # fmt: skip
        yield (config.calculate_per_token_loss, "the loss must be a mean over all tokens of the "
               "step, because micro-batches differ in length", "calculate_per_token_loss=False",
               "pass --calculate-per-token-loss")  # fmt: skip
        yield (config.variable_seq_lengths or grid.pp == 1, "pipeline stages must send each other "
               "the shapes of their tensors, because micro-batches differ in length",
               "variable_seq_lengths=False", "set it in the model's configuration")  # fmt: skip
        chunks = config.virtual_pipeline_model_parallel_size or 1
        yield (chunks == 1 or grid.pp > 2, "a pipeline of several model chunks must have more than "
               "two stages, because between two stages Megatron mixes up the shapes of both "
               "directions", f"{grid.pp} stages of {chunks} model chunks",
               "use one chunk, or more stages")  # fmt: skip
        sizes = list(self._sampler.cp_sizes)
        yield (not config.mtp_num_layers or set(sizes) == {grid.cp},
               "with multi-token prediction, micro-batches must run on the whole context-parallel "
               "group, because Megatron shifts tokens across that group",
               f"context-parallel sizes {sizes}", "leave cp_sizes out")  # fmt: skip
        yield (names_burst(config.cp_comm_type) or set(sizes) == {grid.cp},
               "the model's configuration must ask for burst, because layers that only name it in "
               "their spec do not follow a micro-batch's group",
               f"cp_comm_type={config.cp_comm_type!r} and context-parallel sizes {sizes}",
               'set cp_comm_type="burst", or leave cp_sizes out')  # fmt: skip
        if args is not None:
            yield from _of_command(args, self._sampler)


def _of_command(args: Any, sampler: Sampler) -> Iterable[Need]:
    """Megatron's loop takes the number of micro-batches, and of documents, from its flags."""
    dp, documents, micro_batches = sampler.grid.dp, sampler.documents, sampler.grid.micro_batches
    steps = args.global_batch_size, args.global_batch_size // (args.micro_batch_size * dp)
    ramps = getattr(args, "rampup_batch_size", None)
    yield (not packed.shards_whole_sample(),
           "documents must be sharded one by one, because BalancedBatches pads and shards them so",
           "--dataloader-inter-document-masking", "leave it out")  # fmt: skip
    yield (
        steps == (documents, micro_batches) and not ramps and args.dataloader_type == "external",
        "Megatron's flags must have the sampler's documents and micro-batches of a step, because "
        "Megatron requests that many and resumes from that count",
        f"steps of {documents} documents in {micro_batches} micro-batches a rank, with "
        f"--global-batch-size {args.global_batch_size}, --micro-batch-size "
        f"{args.micro_batch_size}, --dataloader-type {args.dataloader_type}"
        + (f" and --rampup-batch-size {ramps}" if ramps else ""),
        "pass the number of documents in a step as the global batch size, their mean number in a "
        "micro-batch as the micro-batch size, --dataloader-type external, and no ramp-up",
    )
