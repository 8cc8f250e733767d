"""How many slots a call cycles through: the engine allocates as many, the planner counts them."""

from megatron_burst.schedule.call import Cargo

_LARGE = 64 << 20  # bytes of a slot; below, a second one costs less than a second barrier
_LONG_ROUND = 256 << 20  # a KV head of 512K tokens


def pulled_count(cargo: Cargo, rounds: int, num_bytes: float) -> int:
    """Slots that pulling needs: inputs arrive before the next round begins; shares must not make a
    rank wait for the slowest one in every round. One slot is enough if waiting costs at most a
    percent: in a call of one round, and between rounds whose kernels take a tenth of a second while
    their slots move in a millisecond."""
    if num_bytes >= (_LONG_ROUND if rounds > 1 else _LARGE) and rounds <= 2:
        return 1
    return 2 if cargo is Cargo.READ else min(3, rounds + 1)


def sent_count(rounds: int) -> int:
    """Slots that sending needs: two rounds may be in flight."""
    return min(2, rounds)


def power_below(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << number.bit_length() - 1
