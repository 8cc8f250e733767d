"""Files that are almost right: one place of a valid file is replaced, by a seeded generator."""

import re
from pathlib import Path
from random import Random

_WORDS = re.compile(rb'"[^"\n]*"|-?\d[\d.e+-]*|--[\w-]+|[A-Za-z_][\w-]*')
_VALUES = (  # of every type, and at or beyond the ends of what a number or a name may be
    b"null", b"true", b"false", b"{}", b"[]", b"[1, 2]", b'{"a": 1}', b'""', b'"7"', b"0", b"-1",
    b"0.5", b"1e18", b"1" + b"0" * 18, b"1e308", b"1e400", b"-Infinity", b"NaN", b"nan", b"inf",
    b"9" * 400, b"9" * 5000, b"18446744073709551616", b"2147483648", b"99999", b"a" * 5000,
    b'"' + b"a" * 5000 + b'"', b"--" + b"a" * 60_000, rb'"\u001b[31mred\u0007"', b"\x1b[31mred",
    rb'"\ud800"', rb'"\u0000"', b'"$a$ \xe2\x80\xae"', b"[" * 80 + b"]" * 80,
    b"[" * 5000 + b"]" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 200_000, b"$((1))",
    b"a." * 2000 + b"a = 1", b"[[[0]]]", b'["x"]', b"[null]", b"[-1]", b"[1e400]",
)  # fmt: skip


def mutated(valid: bytes, seed: int) -> bytes | None:
    """A changed copy of a file, always the same for a seed; None: a folder in its place."""
    random = Random(seed)
    kind = random.randrange(14)
    if kind == 0:
        return random.choice((None, b"", b"\0", b"null", b"[]", b"{}", b"\n" * 200_000))
    if kind == 1:
        return valid[: random.randrange(len(valid) + 1)]
    at = random.randrange(len(valid) + 1)
    if kind == 2:
        return valid[:at] + random.choice((b"\xff\xfe", b"\0", b"\x1b[2J")) + valid[at + 1 :]
    if kind == 3:
        return valid[:at] + bytes(random.randrange(256) for _ in range(8)) + valid[at + 8 :]
    if kind == 4:
        return valid[:at] + random.choice(_VALUES) + valid[at:]
    if kind == 5:
        return valid + b"\n" * random.choice((1, 200_000)) + random.choice(_VALUES)
    words = list(_WORDS.finditer(valid))
    for word in sorted(random.sample(words, min(len(words), random.choice((1, 1, 1, 3)))),
                       key=lambda word: -word.start()):  # fmt: skip
        valid = valid[: word.start()] + random.choice(_VALUES) + valid[word.end() :]
    return valid


def placed(content: bytes | None, path: Path) -> Path:
    """Writes it, or makes a folder of that name."""
    path.mkdir() if content is None else path.write_bytes(content)
    return path
