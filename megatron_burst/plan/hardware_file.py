"""Hardware from and to TOML: presets, files like theirs, and what `calibrate` wrote."""

from pathlib import Path

from megatron_burst.errors import BurstError
from megatron_burst.plan.calibration import Calibration
from megatron_burst.plan.calibration import hardware as measured
from megatron_burst.plan.hardware import Hardware, preset, preset_names
from megatron_burst.plan.tables import TomlFile, as_tables, nearest


def hardware(name_or_path: str) -> Hardware:
    """A preset by name, else the TOML file of that path.

    Raises:
        BurstError: if it is neither, or the file is wrong.
    """
    names = preset_names()
    if name_or_path.lower() in names:
        return preset(name_or_path.lower())
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        return read_hardware(path)
    raise BurstError(
        "hardware: --hardware must be a preset or a TOML file, because speeds come from there; got "
        f"{name_or_path!r}{nearest(name_or_path.lower(), names)}; choose one of {', '.join(names)} "
        "or a file that megatron-burst calibrate wrote"
    )


def read_hardware(path: Path) -> Hardware:
    """Hardware from a TOML file.

    Raises:
        BurstError: if the file cannot be read, is no TOML, or lacks or has too many figures.
    """
    return _hardware(TomlFile.at(path), str(path))


def parse_hardware(text: str, name: str) -> Hardware:
    """Hardware from TOML, or from what calibrate wrote.

    Args:
        text: the TOML.
        name: of the file, for complaints.

    Raises:
        BurstError: if it is no TOML, or lacks or has too many figures.
    """
    return _hardware(TomlFile(text, name), name)


def _hardware(file: TomlFile, name: str) -> Hardware:
    if isinstance(file.table.get("gpu"), str):  # calibrate names the GPU, presets describe it
        return measured(file.read(Calibration), name)
    return file.read(Hardware)


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write a TOML file that `read_hardware` reads back equal."""
    path.write_text(as_toml(hardware), encoding="utf-8")


def as_toml(hardware: Hardware) -> str:
    """Hardware as TOML."""
    return as_tables(hardware)
