"""The package's version, read by pyproject.toml."""

__version__ = "0.2.0"
