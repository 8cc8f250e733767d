"""Draws docs/schedule.png: forward and backward of two nodes x two ranks."""

from pathlib import Path

from megatron_burst.plan.draw import save_picture
from megatron_burst.schedule.call import AttentionShape, Circulate, Direction
from megatron_burst.schedule.emitter import Spec
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_nodes

if __name__ == "__main__":
    shape = AttentionShape(
        batch=1, tokens=8, heads_q=1, heads_kv=1, dim_qk=8, dim_v=8, itemsize=2, stat_bytes=4,
        grad_bytes=4,
    )  # fmt: skip
    panels = [
        Spec(pretend_nodes(4, 2), 0, direction, shape, Layout.ZIGZAG, Mask.CAUSAL, circulate)
        for direction, circulate in zip(Direction, Circulate, strict=True)
    ]
    save_picture(panels, Path(__file__).parent / "schedule.png")
