"""How many slots a call fills in turn: the engine makes as many, the planner counts them."""

from megatron_burst.schedule.call import Cargo

_LARGE = 64 << 20  # bytes of a slot; below, a second one costs less than a second barrier
_LONG_ROUND = 256 << 20  # a KV head of 512K tokens


def pulled_count(cargo: Cargo, rounds: int, num_bytes: float) -> int:
    """Slots that pulling takes: what is read is there before the next round begins; shares must
    not make a rank wait for the slowest one in every round. One does where nothing, or a percent,
    is lost by waiting: in a call of one round, and between two whose kernels run for a tenth of a
    second while their slots move in a millisecond."""
    if num_bytes >= (_LONG_ROUND if rounds > 1 else _LARGE) and rounds <= 2:
        return 1
    return 2 if cargo is Cargo.READ else min(3, rounds + 1)


def sent_count(rounds: int) -> int:
    """Slots that sending takes: two rounds may be under way."""
    return min(2, rounds)
