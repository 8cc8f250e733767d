"""What each operation computes, with cells instead of numbers.

A cell stands for one row and one head of a field. It holds its position, its head, and a bit set of
what was summed into it: keys for results and query gradients, (query, head) pairs for key
gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_burst.schedule import program as ops
from megatron_burst.schedule.layout import ChunkSegments
from megatron_burst.schedule.program import Program, Ref


class Cell(NamedTuple):
    """One head of one row."""

    field: str
    position: int  # in the sequence; -1: of an empty sum
    head: int
    of: int = 0  # bit set of what was summed into it


Rows = list[list[Cell | None]]  # cells by row and head
Fields = Mapping[str, Rows]


class WrongError(Exception):
    """An operation reads or writes something wrong."""


def written(name: str, cells: Rows, where: object) -> Rows:
    """The cells.

    Raises:
        WrongError: if one of them was not written.
    """
    for row, line in enumerate(cells):
        if None in line:
            raise WrongError(f"reads {name} of {where}, which is not written in row {row}")
    return cells


def _taken(fields: Fields, name: str, refs: Sequence[Ref]) -> Rows:
    if name not in fields:
        raise WrongError(f"needs {name}, which none of {[ref.buffer for ref in refs]} has")
    return written(name, fields[name], [ref.buffer for ref in refs])


def _copy(values, program: Program, op: ops.Copy) -> None:
    targets = values.names(program, op.target)
    for name, cells in values.first_of(program, op.sources).items():
        if name in targets:
            values.write(program, op.target, name, written(name, cells, op.sources))


def _arranged(values, program: Program, op: ops.Arrange) -> tuple[list[int], list[int]]:
    """Positions of the rows before, and after arranging."""
    size = program.topology.cp_size
    src_blocks = [place for block in op.src_blocks for place in values.places(block, size)]
    return src_blocks, values.places(op.dst_chunks, size)


def _arrange(values, program: Program, op: ops.Arrange) -> None:
    src_blocks, wanted = _arranged(values, program, op)
    rows, source = (
        {place: row for row, place in enumerate(src_blocks)},
        values.read(program, op.source),
    )
    for name in values.names(program, op.target):
        cells = _taken(source, name, (op.source,))
        if [row[0].position for row in cells] != src_blocks:
            raise WrongError(f"rows of {op.source} are said to be at {src_blocks}")
        values.write(program, op.target, name, [cells[rows[place]] for place in wanted])


def _restore(values, program: Program, op: ops.Restore) -> None:
    src_blocks, arranged = _arranged(values, program, op)
    for name, cells in values.read(program, op.source).items():
        copies: dict[int, list] = {place: [] for place in src_blocks}
        for place, row in zip(arranged, written(name, cells, op.source), strict=True):
            copies[place].append(row)
        none = [Cell(name, -1, -1)] * len(cells[0])
        made = [_join(name, [[row] for row in copies[place] or [none]])[0] for place in src_blocks]
        values.write(program, op.target, name, made)


def _to_ranks(values, program: Program, op: ops.ToRanks) -> None:
    found = values.first_of(program, op.sources)
    for name in values.names(program, op.target):
        cells = _taken(found, name, op.sources)
        made = [[row[head] for head in _heads_of(op, rank, len(row))]
                for rank in range(op.ranks) for row in cells]  # fmt: skip
        values.write(program, op.target, name, made)


def _heads_of(op: ops.ToRanks | ops.FromRanks, rank: int, heads: int) -> list[int]:
    """A rank's heads among all: its KV heads, or its share of the query heads of each."""
    first, share = rank // op.copies * op.heads_kv, rank % op.copies
    group = heads * op.copies // (op.ranks * op.heads_kv)
    own = group // op.copies or 1
    start = share * own if group > 1 else 0
    kv_heads = range(first, first + op.heads_kv)
    return [kv * group + start + head for kv in kv_heads for head in range(own)]


def _from_ranks(values, program: Program, op: ops.FromRanks) -> None:
    found = values.read(program, op.source)
    for target in op.targets:
        for name in values.names(program, target):
            cells = _taken(found, name, (op.source,))
            rows = len(cells) // op.ranks
            heads = len(values.read(program, target)[name][0])
            made = [[[] for _ in range(heads)] for _ in range(rows)]
            for rank in range(op.ranks):
                for own, head in enumerate(_heads_of(op, rank, heads)):
                    for row in range(rows):
                        made[row][head].append(cells[rank * rows + row][own])
            values.write(
                program, target, name, [[_joined(name, some) for some in row] for row in made]
            )


def _fill(values, program: Program, op: ops.Fill) -> None:
    for name, cells in values.read(program, op.target).items():
        values.write(program, op.target, name, [[Cell(name, -1, -1) for _ in row] for row in cells])


def _seen(
    values, program: Program, op: ops.Attend | ops.AttendBackward, q: Rows, k: Rows
) -> list[int]:
    """The key rows of a tile that each query row sees, as bit sets. In each document, the mask
    aligns the last query row with the last key row.

    Raises:
        WrongError: if a query row has no key, or rows are not at the positions in `op.places`.
    """
    documents = [(range(len(q)), range(len(k)))]
    if isinstance(op.positions, ChunkSegments):
        documents = _segments(values, program.topology.cp_size, op.positions, q, k)
    elif op.mask.documents:
        of_q, of_k = (_documents(values, *both) for both in zip((q, k), op.positions, strict=True))
        documents = [(of_q[one], of_k[one]) for one in of_q if one in of_k]
    found, mask = [0] * len(q), op.mask
    for rows, columns in documents:
        if mask.causal and len(rows) > len(columns):
            raise WrongError(f"a causal tile has {len(rows)} query rows, {len(columns)} key rows")
        for number, row in enumerate(rows):
            own = len(columns) - len(rows) + number
            first = 0 if mask.left is None else max(0, own - mask.left)
            stop = len(columns) if mask.right is None else max(0, own + mask.right + 1)
            for key in columns[first:stop]:
                found[row] |= 1 << key
    if not (all(found) or op.mask.documents):
        raise WrongError(f"query row {found.index(0)} of a tile sees no key")
    return found


def _segments(
    values, size: int, runs: ChunkSegments, q: Rows, k: Rows
) -> list[tuple[range, range]]:
    """Rows of queries and of keys of each segment."""
    found, rows = [], [0, 0]
    for edges in values.edges():
        for pair in runs.pairs:
            both = []
            for side, (numbers, cells) in enumerate(zip(pair, (q, k), strict=True)):
                places = values.places(numbers, size, edges)
                mine = range(rows[side], rows[side] + len(places))
                if places != [row[0].position for row in cells[mine.start : mine.stop]]:
                    raise WrongError(f"rows {mine} are said to be at {places}")
                both.append(mine)
                rows[side] = mine.stop
            found.append((both[0], both[1]))
    if rows != [len(q), len(k)]:
        raise WrongError(f"{len(q)} queries and {len(k)} keys in segments of {rows}")
    return found


def _documents(values, rows: Rows, places: Iterable[range]) -> dict[int, range]:
    """The rows of each document, by where it begins."""
    told, are = [place for some in places for place in some], [row[0].position for row in rows]
    if told != are:
        raise WrongError(f"rows of positions {are} are said to be at {told}")
    found: dict[int, range] = {}
    for number, place in enumerate(are):
        start, _ = values.document(place)
        first = found[start].start if start in found else number
        found[start] = range(first, number + 1)
    return found


def _keys(values, kv: Fields, refs: Sequence[Ref], name: str = "k") -> Rows:
    """k, after checking that v has the same rows and heads."""
    k, v = _taken(kv, "k", refs), _taken(kv, "v", refs)
    for row, other in zip(k, v, strict=True):
        if [cell[1:] for cell in row] != [cell[1:] for cell in other]:
            raise WrongError(f"k is {row} where v is {other}")
    return k


def _disjoint(sets: Iterable[int], what: str) -> int:
    total = 0
    for one in sets:
        if total & one:
            raise WrongError(f"{what} has {bits(total & one)} twice")
        total |= one
    return total


def _tile(
    values, program: Program, op: ops.Attend | ops.AttendBackward, q: Rows, k: Rows
) -> list[list[int]]:
    """The keys that meet each query row, by row and query head."""
    columns = list(zip(*k, strict=True))
    group = len(q[0]) // len(columns)  # of one rank; a KV head's query heads may be on several
    if len(q[0]) != len(columns) * group or not group:
        raise WrongError(f"{len(q[0])} query heads meet {len(columns)} KV heads")
    for column in columns:
        heads = {cell.head for cell in column}
        if len(heads) > 1:
            raise WrongError(f"keys of heads {sorted(heads)} in one head")
    places = [1 << row[0].position for row in k]
    met = [_disjoint((places[key] for key in range(len(k)) if seen >> key & 1), "a tile of keys")
           for seen in _seen(values, program, op, q, k)]  # fmt: skip
    for row in q:
        for head, cell in enumerate(row):
            if cell.head // values.group != columns[head // group][0].head:
                raise WrongError(f"query head {cell.head} meets {columns[head // group][0]}")
    return [[keys] * len(q[0]) for keys in met]


def _attend(values, program: Program, op: ops.Attend) -> None:
    q = _taken(values.read(program, op.q), "q", (op.q,))
    k = _keys(values, values.read(program, op.kv), (op.kv,))
    met = _tile(values, program, op, q, k)
    if any([cell.head for cell in row] != list(op.heads) for row in q):
        raise WrongError(f"heads {op.heads} are named beside queries of others")
    if op.joins_sinks:
        met = [[of | 1 << values.size for of in row] for row in met]
    for name in ("out", "lse"):
        made = [[Cell(name, cell.position, cell.head, of) for cell, of in zip(*both, strict=True)]
                for both in zip(q, met, strict=True)]  # fmt: skip
        values.write(program, _target(values, program, op.into, name), name, made)


def _target(values, program: Program, into: Sequence[Ref], name: str) -> Ref:
    """The first buffer that has a field."""
    for ref in into:
        if name in values.names(program, ref):
            return ref
    raise WrongError(f"nothing of {[ref.buffer for ref in into]} has {name}")


def _attend_backward(values, program: Program, op: ops.AttendBackward) -> None:
    side = values.first_of(program, op.sides)
    q = _side(values, side, op.sides)
    k = _keys(values, values.read(program, op.kv), (op.kv,))
    met = _tile(values, program, op, q, k)
    dq = [[Cell("dq", cell.position, cell.head, of) for cell, of in zip(*both, strict=True)]
          for both in zip(q, met, strict=True)]  # fmt: skip
    values.write(program, op.dq, "dq", dq)
    seen, heads = _seen(values, program, op, q, k), len(k[0])
    for name in ("dk", "dv"):
        made = [[Cell(name, key.position, key.head, _queries(values, q, seen, row, head, heads))
                 for head, key in enumerate(cells)] for row, cells in enumerate(k)]  # fmt: skip
        values.write(program, op.dkv, name, made)


def _side(values, side: Fields, refs: Sequence[Ref]) -> Rows:
    """q, after checking that the query side is complete.

    Raises:
        WrongError: if a field is missing or has other rows or heads, or lse is not over all keys
            and the sink.
    """
    q = _taken(side, "q", refs)
    others = ("dout", "lse", *(name for name in ("delta", "out") if name in side))
    if len(others) < 3:
        raise WrongError("the query side has neither delta nor out")
    for name in others:
        for row, other in zip(q, _taken(side, name, refs), strict=True):
            if [cell[1:3] for cell in row] != [cell[1:3] for cell in other]:
                raise WrongError(f"q is {row} where {name} is {other}")
    for row in _taken(side, "lse", refs):
        for cell in row:
            if cell != values.whole("lse", cell.position, cell.head):
                raise WrongError(f"lse of position {cell.position} is over {bits(cell.of)} only")
    return q


def _queries(values, q: Rows, seen: Sequence[int], key: int, head: int, heads: int) -> int:
    """The (query, head) pairs that saw a key row: its gradient is the sum over them. `heads` is the
    number of KV heads."""
    group, own = values.group, len(q[0]) // heads
    columns = range(head * own, (head + 1) * own)
    pairs = [
        1 << row[column].position * group + row[column].head % group
        for row, keys in zip(q, seen, strict=True)
        for column in columns
        if keys >> key & 1
    ]
    return _disjoint(pairs, f"gradient of key row {key}")


def _joined(name: str, cells: Sequence[Cell]) -> Cell:
    """The sum of cells, or the merged result."""
    real = [cell for cell in cells if cell.position >= 0]
    if not real:
        return cells[0]
    if len({cell[1:3] for cell in real}) > 1:
        raise WrongError(f"{name} of different rows or heads are joined: {real}")
    of = _disjoint((cell.of for cell in real), f"{name} of position {real[0].position}")
    return real[0]._replace(of=of)


def _join(name: str, parts: Sequence[Rows]) -> Rows:
    return [[_joined(name, cells) for cells in zip(*rows, strict=True)]
            for rows in zip(*parts, strict=True)]  # fmt: skip


def _merge(values, program: Program, op: ops.Merge) -> None:
    if not op.parts:
        raise WrongError("nothing is merged")
    parts = [values.read(program, part) for part in op.parts]
    for name in ("out", "lse"):
        made = _join(name, [_taken(part, name, op.parts) for part in parts])
        values.write(program, _target(values, program, op.into, name), name, made)


def _add(values, program: Program, op: ops.Add) -> None:
    parts = [values.read(program, part) for part in op.parts]
    for name, cells in values.read(program, op.into).items():
        if not parts:
            made = [[Cell(name, -1, -1) for _ in row] for row in cells]
        elif all(name in part for part in parts):
            made = _join(name, [_taken(part, name, op.parts) for part in parts])
        else:
            continue
        values.write(program, op.into, name, made)


def _delta(values, program: Program, op: ops.Delta) -> None:
    side = values.read(program, op.side)
    dout, out = (_taken(side, name, (op.side,)) for name in ("dout", "out"))
    made = [[Cell("delta", *cell[1:3]) for cell in row] for row in dout]
    if made != [[Cell("delta", *cell[1:3]) for cell in row] for row in out]:
        raise WrongError("dout and out are of different rows")
    values.write(program, op.into, "delta", made)


def _stand_in(values, program: Program, op: ops.SurrogateOut) -> None:
    side = values.first_of(program, op.sides)
    dout, delta = (_taken(side, name, op.sides) for name in ("dout", "delta"))
    made = [[Cell("delta", *cell[1:3]) for cell in row] for row in dout]
    if made != delta:
        raise WrongError("dout and delta are of different rows")
    whole = [[values.whole("out", *cell[1:3]) for cell in row] for row in dout]
    values.write(program, op.into, "out", whole)


def bits(of: int) -> list[int]:
    """The numbers in a bit set."""
    return [place for place in range(of.bit_length()) if of >> place & 1]


APPLY: Mapping[type, Callable] = {
    ops.Copy: _copy, ops.Arrange: _arrange, ops.Restore: _restore,
    ops.ToRanks: _to_ranks, ops.FromRanks: _from_ranks,
    ops.Fill: _fill, ops.Attend: _attend, ops.AttendBackward: _attend_backward, ops.Merge: _merge,
    ops.Add: _add,
    ops.Delta: _delta, ops.SurrogateOut: _stand_in,
}  # fmt: skip
