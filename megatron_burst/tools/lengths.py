"""How long the documents of a data set are: a histogram, a list, or Megatron's index; and draws."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_burst.balance.packing import starts_in_order
from megatron_burst.errors import BurstError
from megatron_burst.files import Reader, excerpt

_MOST = 1 << 40  # tokens or documents: sums stay below 64 bits
_BYTES = 64 << 20  # of a text; an index may be longer
_WHY = "the documents of steps are drawn from it"
_MUST = (
    "be a histogram (.csv with the columns shortest, longest and documents, or length and "
    'documents), lengths (.jsonl of numbers, or of objects with "length") or the index of a '
    "Megatron data set (.idx)"
)
_BINS = {"shortest", "longest", "documents"}, {"length", "documents"}
_MAGIC = b"MMIDIDX\x00\x00"  # Megatron's index (megatron/core/datasets/indexed_dataset.py)
_HEADER = np.dtype([("magic", "V9"), ("version", "<u8"), ("dtype", "u1"),
                    ("sequences", "<u8"), ("documents", "<u8")])  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """A data set: `counts` documents of `shortest` to `longest` tokens, all equally likely."""

    shortest: np.ndarray
    longest: np.ndarray
    counts: np.ndarray

    @property
    def documents(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    def share_above(self, tokens: int) -> float:
        """Share of the documents that are longer."""
        span = self.longest - self.shortest + 1
        above = np.clip(self.longest - tokens, 0, span) / span
        return float((above * self.counts).sum()) / self.documents

    def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Tokens of so many documents, any as likely as another."""
        bins = rng.choice(len(self.counts), count, p=self.counts / self.counts.sum())
        return rng.integers(self.shortest[bins], self.longest[bins], endpoint=True)

    def of_step(self, packed: int, micro_batches: int, multiple: int, seed: int) -> np.ndarray:
        """Tokens of documents that fill so many micro-batches in the order drawn, no document more.

        `packed`: tokens of a micro-batch, to which longer documents are cut; `multiple` divides it,
        and documents are padded to it.
        """
        rng, tokens = np.random.default_rng(seed), np.zeros(0, dtype=np.int64)
        middles = np.minimum((self.shortest + self.longest) / 2, packed)
        mean = float((middles * self.counts).sum()) / self.documents
        while True:
            more = self.drawn(1 + int(1.1 * micro_batches * packed / mean), rng)
            more = -(-np.minimum(more, packed) // multiple) * multiple
            tokens = np.concatenate((tokens, more))
            starts = starts_in_order(tokens, packed, micro_batches)
            if len(starts) > micro_batches:
                return tokens[: starts[micro_batches]]


def lengths_in(path: Path) -> Lengths:
    """Read a file of lengths; its suffix says which of the kinds in `_MUST` it is.

    Raises:
        BurstError: if it has something else, or no documents.
    """
    readers = {".csv": _histogram, ".jsonl": _list, ".idx": _index}
    reader = Reader("plan: --lengths", str(path), _WHY, "name or write such a file", most=_BYTES)
    if path.suffix not in readers:
        raise reader.refusal(_MUST, f"a name that ends in {path.suffix or 'nothing'}")
    try:
        lengths = readers[path.suffix](reader)
    except (OSError, ValueError, csv.Error) as error:
        if isinstance(error, BurstError):
            raise
        raise reader.refusal(_MUST, error) from None
    if not lengths.documents:
        raise reader.refusal(_MUST, "no documents")
    return lengths


def _histogram(reader: Reader) -> Lengths:
    rows = csv.DictReader(reader.text().splitlines())
    columns = set(rows.fieldnames or ())
    if columns not in _BINS:
        raise ValueError(f"the columns {', '.join(rows.fieldnames or ()) or 'of no line'}")
    bins = [_bin(row, f"line {rows.line_num}") for row in rows]
    return Lengths(*np.array(bins, dtype=np.int64).reshape(-1, 3).T)


def _bin(row: dict[str, str], where: str) -> tuple[int, int, int]:
    """Shortest, longest and count of a row; a bin from 0 on begins with 1 token."""
    try:
        numbers = {name: int(text) for name, text in row.items()}
    except (TypeError, ValueError):
        raise ValueError(f"{where}: something other than a whole number for each column") from None
    low, high = (numbers.get(name, numbers.get("length", 0)) for name in ("shortest", "longest"))
    if not (0 <= low <= high <= _MOST and high and 0 <= numbers["documents"] <= _MOST):
        raise ValueError(f"{where}: {numbers['documents']} documents of {low} to {high} tokens")
    return max(low, 1), high, numbers["documents"]


def _list(reader: Reader) -> Lengths:
    lines = enumerate(reader.text().splitlines(), 1)
    return _of_each(_length(reader, *line) for line in lines if line[1].strip())


def _length(reader: Reader, number: int, line: str) -> int:
    data = reader.json(line, f"line {number}")
    length = data.get("length") if isinstance(data, dict) else data
    if type(length) is not int or not 1 <= length <= _MOST:
        raise ValueError(f"line {number}: {excerpt(line.strip(), 40)}, no length from 1 on")
    return length


def _of_each(lengths: Iterable[int]) -> Lengths:
    each, counts = np.unique(np.fromiter(lengths, dtype=np.int64), return_counts=True)
    return Lengths(each, each, counts)


def _index(reader: Reader) -> Lengths:
    """A document has all sequences up to the next document's first one."""
    path = Path(reader.name)
    with path.open("rb") as file:
        head = file.read(_HEADER.itemsize)
        if len(head) < _HEADER.itemsize or not head.startswith(_MAGIC):
            raise ValueError("no Megatron index")
        (fields,) = np.frombuffer(head, _HEADER)
        sequences, documents = int(fields["sequences"]), int(fields["documents"])
        if path.stat().st_size < len(head) + 12 * sequences + 8 * documents:
            raise ValueError(f"less than the {sequences} sequences that it names")
        tokens = np.fromfile(file, "<i4", sequences)
        file.seek(8 * sequences, 1)  # where each is in the data
        firsts = np.fromfile(file, "<i8", documents)
    ends = np.concatenate(([0], np.cumsum(tokens, dtype=np.int64)))
    if len(firsts) and not 0 <= firsts.min() <= firsts.max() <= sequences:
        raise ValueError("documents of sequences that it does not have")
    lengths = np.diff(ends[firsts])
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a length of {lengths.min()} of document {lengths.argmin()}")
    return _of_each(lengths)
