"""A dictionary that forgets."""


class Latest[K, V](dict[K, V]):
    """A dictionary of at most `most` entries: the one put in longest ago goes first."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]

    def recent(self, key: K) -> V | None:
        """The value of a key, which counts as put in now; None if it is not there."""
        value = self.pop(key, None)
        if value is not None:
            super().__setitem__(key, value)
        return value
