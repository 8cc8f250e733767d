"""Captures what the package logs for the user."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hearing() -> Iterator[list[str]]:
    """The lines that `megatron_burst` logs meanwhile, in order."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, ear = logging.getLogger("megatron_burst"), Ear()
    logger.addHandler(ear)
    try:
        yield lines
    finally:
        logger.removeHandler(ear)
