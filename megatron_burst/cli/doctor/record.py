"""What a check found."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class Status(StrEnum):
    """How bad it is; in that order."""

    FAIL = "fail"  # would break a run
    WARN = "warn"  # would cost speed, or may break one
    SKIP = "skip"  # could not be checked, or does not apply
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: of the check.
        status: how bad it is.
        what: what was found.
        change: what to change; "" if nothing.
        where: the hosts or ranks that it is about; "" for this machine.
    """

    name: str
    status: Status
    what: str
    change: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """A link between two ranks that was measured.

    Attributes:
        kind: "intra" or "inter".
        source, dest: global ranks.
        hosts: their hosts' names.
        gb_per_s: in 1e9 bytes a second, with all rings of the kind busy.
        ratio: to the median of its kind.
    """

    kind: str
    source: int
    dest: int
    hosts: tuple[str, str]
    gb_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that the doctor found.

    Attributes:
        checks: worst first within a printout, in order of checking here.
        links: measured links.
        environment: lines to paste into a shell, if any were made.
    """

    checks: tuple[Check, ...]
    links: tuple[LinkRate, ...] = ()
    environment: tuple[str, ...] = ()

    @property
    def breaks(self) -> bool:
        """Whether a run would break."""
        return any(check.status is Status.FAIL for check in self.checks)

    def as_dict(self) -> dict:
        """For JSON."""
        return {"breaks": self.breaks, **asdict(self)}


@dataclass(slots=True)
class Merged:
    """Equal findings of several places as one."""

    total: int
    places: dict[Check, list[str]] = field(default_factory=dict)

    def add(self, where: str, checks: Iterable[Check]) -> None:
        """The findings of one place."""
        for check in checks:
            self.places.setdefault(replace(check, where=""), []).append(where)

    def checks(self) -> list[Check]:
        """Each finding once, with its places."""
        everywhere = f"all {self.total} hosts"
        return [
            replace(check, where=", ".join(at) if len(at) < max(2, self.total) else everywhere)
            for check, at in self.places.items()
        ]
