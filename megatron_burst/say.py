"""What users are told while a run goes on: through Python's logging, as `megatron_burst`.

Megatron's own handler prints it. Where nothing is set up, standard error does: a line that says
which kernel runs must not need three lines of set-up. To see less, set the logger's level.
"""

import logging


def say(text: str, level: int = logging.INFO) -> None:
    """Tell the user something; the caller sees to it that one rank does, and once."""
    logger = logging.getLogger("megatron_burst")
    root_says = logging.getLogger().level not in (logging.NOTSET, logging.WARNING)
    if logger.level == logging.NOTSET and not root_says:  # WARNING is the root's default
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(handler := logging.StreamHandler())
        # those who set up logging later have their own handler
        handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger.log(level, text)
