"""Draws docs/schedule.png: forward and backward of two hosts x two ranks."""

from pathlib import Path

from megatron_burst.plan.draw import save_picture
from megatron_burst.plan.ring import ring_schedule
from megatron_burst.schedule.call import Circulate, Direction
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.topology import pretend_hosts

if __name__ == "__main__":
    topology = pretend_hosts(4, 2)
    panels = [
        [
            ring_schedule(
                topology, rank, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, tokens=8,
                direction=direction, circulate=circulate,
            )
            for rank in range(topology.cp_size)
        ]
        for direction, circulate in zip(Direction, Circulate, strict=True)
    ]  # fmt: skip
    save_picture(panels, Path(__file__).parent / "schedule.png")
