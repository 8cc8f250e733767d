"""Errors. One sentence each: who, what must hold and why; what was got; what to change."""


class BurstError(ValueError):
    """An input, option or environment that burst attention refuses.

    Raised before anything is computed or sent, and wherever it can be on all ranks together.
    """


class DisagreementError(BurstError):
    """The ranks of a context-parallel group called with different shapes or options."""
