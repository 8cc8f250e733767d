"""Work beside the kernels: waits, copies and posts that must not hold them up."""

import torch


class Aside:
    """Queues what is called within it on a stream of its own, behind what was queued on the current
    stream when this was made.

    Made before kernels and entered after them, it runs beside them and yet lies behind them in the
    GPU's queue. With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for, there is one for all
    streams, and whatever waits in it holds up everything behind it. Without a stream, what is
    called within is queued where it is.

    Args:
        stream: the stream; None on CPU, and where nothing is to overlap.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._since = stream and torch.cuda.current_stream(stream.device).record_event()
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> "Aside":
        if self._stream:
            self._stream.wait_event(self._since)
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._stream:
            self._done = self._stream.record_event()
            self._inside.__exit__(*error)

    def wait(self) -> None:
        """Let the current stream wait for what was queued within."""
        if self._done:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
