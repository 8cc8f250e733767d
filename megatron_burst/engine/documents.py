"""The documents of a packed sample, as kernels and programs want them, on the device."""

from functools import cached_property

import torch
from torch import Tensor

from megatron_burst.kernels.visible import Segments
from megatron_burst.schedule.mask import Places


class Documents:
    """Where the documents of one sample begin, and what follows from that; made once a sample.

    All of it is computed on the device: nothing waits for the host.

    Args:
        starts: int32 [n + 1]: where each document begins, not decreasing, and where the last one
            ends.
        longest: tokens of the longest document, or more.
        tokens: of the whole sample.
        cp_size: ranks that it is sharded over.
        lengths: int32 [n]: tokens of each document but its padding, which is at its end; None:
            nothing is padded.
    """

    def __init__(
        self, starts: Tensor, longest: int, tokens: int, cp_size: int, lengths: Tensor | None = None
    ) -> None:
        self._starts, self._lengths = starts, lengths
        self._longest, self._tokens, self._cp_size = longest, tokens, cp_size
        self._found: dict[tuple[Places, Places], Segments] = {}

    def segments(self, q: Places, keys: Places) -> Segments:
        """Of a kernel call whose queries and keys are at these positions."""
        if (q, keys) not in self._found:
            of_q, of_keys = self._edges
            self._found[q, keys] = Segments(
                _rows_before(of_q, q), _rows_before(of_keys, keys),
                min(self._longest, sum(map(len, q))), min(self._longest, sum(map(len, keys))),
            )  # fmt: skip
        return self._found[q, keys]

    @cached_property
    def _edges(self) -> tuple[Tensor, Tensor]:
        """Positions between segments of queries, and of keys.

        Padding is no document: its queries are a segment without keys, its keys one without
        queries. So is what follows the last document.
        """
        starts, end = self._starts, self._starts.new_full((1,), self._tokens)
        tail = torch.cat((end, end)), torch.cat((starts[-1:], end))
        if self._lengths is None:
            return torch.cat((starts, tail[0])), torch.cat((starts, tail[1]))
        first, stop = starts[:-1], starts[1:]
        last = first + self._lengths
        of_q, of_keys = torch.stack((first, last, stop), 1), torch.stack((first, last, last), 1)
        begin = starts.new_zeros(1)
        return tuple(
            torch.cat((begin, edges.flatten(), starts[-1:], more))
            for edges, more in zip((of_q, of_keys), tail, strict=True)
        )

    @cached_property
    def sample_order(self) -> Tensor:
        """By position, the row where all ranks' shards lie one behind the other and each rank has
        chunks r and 2P-1-r of every document: int64 [tokens]."""
        places = torch.arange(self._tokens, device=self._starts.device)
        starts, size = self._starts.long(), self._cp_size
        document = torch.searchsorted(starts, places, right=True).sub_(1).clamp_(0, len(starts) - 2)
        start = starts[document]
        chunk = ((starts[document + 1] - start) // (2 * size)).clamp_(1)
        number, row = (places - start) // chunk, (places - start) % chunk
        late = number >= size
        rank = torch.where(late, 2 * size - 1 - number, number)
        return rank * (self._tokens // size) + start // size + late * chunk + row

    @cached_property
    def rank_order(self) -> Tensor:
        """The inverse: by row of all ranks' shards, the position."""
        places = torch.arange(self._tokens, device=self._starts.device)
        return torch.empty_like(places).scatter_(0, self.sample_order, places)


def _rows_before(edges: Tensor, places: Places) -> Tensor:
    """How many rows lie before each edge; rows are at these positions, in order: int32."""
    if len(places) == 1 and places[0].start == 0:
        return edges.clamp(max=len(places[0]))
    return torch.stack([(edges - at.start).clamp(0, len(at)) for at in places]).sum(
        0, dtype=torch.int32
    )
