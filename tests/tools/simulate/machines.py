"""Machines for simulated passes."""

from dataclasses import replace

from megatron_burst.tools.hardware import Links, LinkSpeed
from megatron_burst.tools.hardware_file import preset

H200 = preset("h200")


def with_links(speed: LinkSpeed, **gpu):
    return replace(H200, links=Links(speed, speed, speed), gpu=replace(H200.gpu, **gpu))
