"""Puts burst in force where `--context-parallel-impl burst` is given, and hints at it elsewhere."""

from argparse import Action

from megatron_burst.errors import BurstError

WHO = "--context-parallel-impl burst"


class SwitchOn(Action):
    """Has Megatron's specs name burst as soon as `--context-parallel-impl burst` is parsed.

    A script may go past the `validate_args` that checks the run and sets what follows. Burst's core
    attention is built even then, and refuses what was not set.
    """

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        if values == "burst":
            switch_on_burst()


def switch_on_burst() -> None:
    """Have Megatron's specs name burst's core attention; a second time changes nothing."""
    from megatron_burst.mcore.providers import provider_patches

    for patch in provider_patches():
        patch.apply()


def hint_at_burst(init):
    """Replacement of the constructor of Megatron's local attention, which holds whole sequences."""

    def build(self, config, *arguments, **options) -> None:
        if config.context_parallel_size > 1:
            raise BurstError(
                "Megatron's local attention: the context parallel size must be 1, because it "
                "attends within a rank; got --context-parallel-size "
                f"{config.context_parallel_size}; pass {WHO}, or install transformer-engine"
            )
        init(self, config, *arguments, **options)

    return build
