"""Which implementations are compared: what `--impl` says, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import get_args

from megatron_burst.config import BurstConfig, Force
from megatron_burst.errors import BurstError, require

_WHO = "benchmarks.attention"
TE_MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_SHORT = ("auto", "gather", "ring", "a2a")  # of intra=...
# Other libraries' ways and the kernels that each is measured with; behind a + other kernels too.
_WAYS = {
    "torch": (("allgather", "alltoall"), ("cudnn", "flash")),
    "yunchang": (("ring", "ulysses", "usp"), ("auto",)),
}
_SDPA = ("cudnn", "flash", "efficient")  # what torch's context parallelism takes
IMPLS = (
    f"burst[:auto|gather|ring|a2a|FIELD=VALUE,...], te[:{'|'.join(TE_MODES)}], "
    f"torch[:{'|'.join(_WAYS['torch'][0])}[+{'|'.join(_SDPA)}]], ulysses[:BACKEND], "
    f"yunchang[:{'|'.join(_WAYS['yunchang'][0])}[+BACKEND]], ceiling[:BACKEND], "
    "one-gpu[:BACKEND], before"
)


@dataclass(frozen=True, slots=True)
class Impl:
    """One implementation in one mode."""

    name: str  # column `impl`: burst, te, torch, ulysses, yunchang, ceiling, one_gpu or before
    mode: str  # column `mode`; for the kernels alone and ulysses the backend's name, or auto
    config: BurstConfig | None = None  # of burst only

    def __str__(self) -> str:
        return f"{self.name}:{self.mode}"


def impls_of(texts: tuple[str, ...]) -> tuple[Impl, ...]:
    """All that `--impl` names, in order, each once."""
    every = [impl for text in texts for impl in _parse(text)]
    return tuple({str(impl): impl for impl in every}.values())


def _parse(text: str) -> tuple[Impl, ...]:
    name, _, mode = text.partition(":")
    name = name.replace("-", "_")
    if name == "burst":
        mode = mode or "auto"
        config = burst_config(f"intra={mode}" if mode in _SHORT else mode)
        return (Impl(name, mode, config),)
    if name == "te" and mode in ("", *TE_MODES):
        return tuple(Impl(name, each) for each in ([mode] if mode else TE_MODES))
    if name in ("ceiling", "one_gpu", "ulysses") or text == "before":
        return (Impl(name, mode or "auto"),)
    if impls := _ways(name, mode):
        return impls
    raise BurstError(
        f"{_WHO}: --impl must name an implementation, because each is called in its own way; got "
        f"{text!r}; choose among {IMPLS}"
    )


def _ways(name: str, mode: str) -> tuple[Impl, ...]:
    """Another library's, by way and kernel: "ring+fa4"; none if there is no such library or way."""
    ways, kernels = _WAYS.get(name, ((), ()))
    way, _, kernel = mode.partition("+")
    if way not in ("", *ways) or (name == "torch" and kernel not in ("", *_SDPA)):
        return ()
    pairs = product([way] if way else ways, [kernel] if kernel else kernels)
    return tuple(Impl(name, f"{one}+{its}") for one, its in pairs)


def pick[T](names: Sequence[str], known: Mapping[str, T], must: str) -> tuple[T, ...]:
    """The known things in a list of names, empty for all; `must`: who asks, what must hold, why."""
    who, _, what = must.partition(": ")
    others = f"choose among {', '.join(known)}"
    require(who, [(name in known, what, repr(name), others) for name in names])
    return tuple(known[name] for name in names or known)


def burst_config(text: str) -> BurstConfig:
    """The configuration in a text such as "intra=gather,deterministic=true"."""
    forced = {field.name: field.type for field in fields(Force)}
    types = {field.name: field.type for field in fields(BurstConfig)} | forced
    text = text.replace("inter=flat", "flat=true")  # as rows of before have it
    values = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in types or not value:
            raise BurstError(
                f"{_WHO}: a variant of burst must be given as FIELD=VALUE,... with fields of "
                f"BurstConfig, because nothing is silently ignored; got {pair!r} in "
                f"{text!r}; choose among {', '.join(types)}"
            )
        values[name] = _value(name, value, types[name])
    force = Force(**{name: values.pop(name) for name in forced.keys() & values.keys()})
    return BurstConfig(**values, force=force)


def _value(name: str, text: str, kind: type) -> object:
    """A value of a field's type; Literals and names stay text, which the configuration checks."""
    kinds = (kind, *get_args(kind))
    converters = {bool: {"true": True, "false": False}.__getitem__, int: int, float: float}
    convert = next((converters[k] for k in converters if k in kinds), str)
    try:
        return convert(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false"}.get(kind, "a number")
        raise BurstError(
            f"{_WHO}: {name} of a burst variant must be {wanted}, because it is no text; got "
            f"{text!r}; change it"
        ) from None
