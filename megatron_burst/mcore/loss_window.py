"""When a fused loss may add to `main_grad` in forward: from its zeroing to its reduction."""

from collections.abc import Iterator

from megatron_burst.loss.forecast import Forecast
from megatron_burst.patching import Patch

_OWNER = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"


def window_patches() -> tuple[Patch, ...]:
    """Both ends of it; where a wrapper of another kind has the gradients, it never opens."""
    return (
        Patch(
            owner=_OWNER, name="zero_grad_buffer", parameters=("self",), wrap=_opening,
            why="tells the fused loss that main_grad is zero: no hook is called then",
        ),
        Patch(
            owner=_OWNER, name="finish_grad_sync", parameters=("self", "force_all_reduce"),
            wrap=_closing,
            why="fails where main_grad has a loss's gradient without its backward pass: no hook "
            "is called before main_grad is used",
        ),
    )  # fmt: skip


def _opening(zero):
    def zero_and_open(self, *args, **kwargs):
        zero(self, *args, **kwargs)
        # there parameters are gathered in gradients' memory, while forward runs
        if not getattr(self.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            for forecast in _forecasts(self):
                forecast.open()

    return zero_and_open


def _closing(finish):
    def close_and_finish(self, *args, **kwargs):
        for forecast in _forecasts(self):
            forecast.close()
        return finish(self, *args, **kwargs)

    return close_and_finish


def _forecasts(ddp) -> Iterator[Forecast]:
    for module in ddp.modules():
        forecast = getattr(getattr(module, "fused_head", None), "forecast", None)
        if forecast is not None:
            yield forecast
