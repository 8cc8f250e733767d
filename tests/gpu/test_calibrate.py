"""`calibrate` on GPUs: links that CPU processes lack, among them the next GPU's memory, which must
stay mapped while it is read."""

import pytest

from megatron_burst.comm.nodes import my_location, topology_of_locations
from megatron_burst.tools.calibrate import calibrate
from megatron_burst.tools.speeds import Mover
from megatron_burst.tools.world import world_of
from tests.gpu import needs_gpus
from tests.ranks import preload, run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(2),
]
preload("megatron_burst.tools.calibrate")


def pulled(rank):
    """What a rank reads from the next one's symmetric memory, which holds that rank's number; then
    all."""
    world = world_of("cuda")
    mover = Mover(world, topology_of_locations(world.gather(my_location())))
    read = mover.puller(1 << 20)
    window = read.__self__
    window.own.fill_(rank + 1)
    world.synchronize()
    world.barrier()
    read(1 << 10)()
    numbers = window.target[:: 1 << 9].tolist()
    world.barrier()
    del read, window
    return numbers, calibrate(world, None, 120.0, lambda text: None)


def test_two_gpus_measure_all_links_inside_a_node():
    (first, found), (second, other) = run_ranks(pulled, 2, backend="nccl", timeout_s=280)
    assert first[:3] == [2, 2, 1] and second[:3] == [1, 1, 1]  # 1024 bytes of the next rank's
    assert found == other
    kinds = {link.kind for link in found.links}
    assert kinds == {"intra", "copy_engine", "host"}
    assert len(found.kernels) == 2 * 2 * 4  # directions, head dimensions, lengths
    print(found)
