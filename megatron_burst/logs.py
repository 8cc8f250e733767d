"""Messages to the user during a run, through Python's logger `megatron_burst`.

Megatron's handler prints them. Without any handler they go to standard error, so that users see
which kernel runs without setting up logging. To see less, set the logger's level.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any


def log_message(text: str, level: int = logging.INFO) -> None:
    """Log a text for the user; the caller makes sure that one rank does, once."""
    logger = logging.getLogger("megatron_burst")
    root_is_set = logging.getLogger().level not in (logging.NOTSET, logging.WARNING)
    if logger.level == logging.NOTSET and not root_is_set:  # WARNING is the root's default
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(handler := logging.StreamHandler())
        # logging that is set up later brings its own handler
        handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.log(level, text)


@cache  # of this process
def log_message_once(text: str) -> None:
    """As `log_message`, once per process for each text."""
    log_message(text)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and why, as text for the user ("" if it needs no reason)."""

    value: Any
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})" if self.reason else self.value
