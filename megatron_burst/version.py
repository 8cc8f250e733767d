"""The package's version, read by pyproject.toml."""

__version__ = "0.1.0"
