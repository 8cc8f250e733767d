"""`calibrate` on CPU processes: all kinds of rows are there, figures are finite, and the file can
be read back. Guards against rings between the wrong ranks, and rows that only one rank has."""

import math
import re
import tomllib

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from megatron_burst.files import Reader
from megatron_burst.schedule.topology import Link, topology_of
from megatron_burst.tools.calibrate import calibrate
from megatron_burst.tools.hardware import Calibration
from megatron_burst.tools.main import app
from megatron_burst.tools.speeds import Mover, rings
from megatron_burst.tools.world import world_of
from tests.ranks import preload, run_ranks

preload("megatron_burst.tools.calibrate")


def calibrated(rank, budget_s):
    said = []
    return calibrate(world_of("cpu"), "mine", budget_s, said.append), said


def kinds(found):
    return {link.kind for link in found.links}


@pytest.mark.parametrize(
    "nodes, links",
    [
        ("aa", {"intra", "host"}),
        ("ab", {"inter", "host"}),
    ],
)
def test_two_ranks_measure_what_they_have(nodes, links):
    (found, said), (other, nothing) = run_ranks(on_nodes, 2, nodes)
    assert found == other and said and not nothing
    assert kinds(found) == links and found.name == "mine"
    rows = [(k.direction, k.head_dim, k.seq) for k in found.kernels]
    assert len(set(rows)) == len(rows) == 2 * 2 * 2
    figures = [found.memory_gib, found.matmul_tflops, *(k.tflops for k in found.kernels)]
    figures += [f for link in found.links for f in (link.gb_per_s, link.latency_us)]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


def on_nodes(rank, nodes):
    import os

    os.environ["NCCL_HOSTID"] = nodes[rank]
    return calibrated(rank, 100.0)


def test_nothing_new_is_started_when_time_is_up():
    (found, said), _ = run_ranks(calibrated, 2, -1.0)
    assert not found.kernels and not found.links
    assert re.match("time was up; not measured: link intra, .*head dimension 128$", said[-1])


def test_rings_of_even_and_uneven_nodes():
    even = rings(topology_of("abab"))
    assert even == {Link.INTRA: [(0, 2), (1, 3)], Link.INTER: [(0, 1), (2, 3)]}
    with pytest.warns(UserWarning):
        uneven = rings(topology_of("aabc"))
    assert uneven == {Link.INTRA: [(0, 1)], Link.INTER: [(0, 2, 3)]}
    assert rings(topology_of("a")) == {Link.INTRA: [], Link.INTER: []}


def moved(rank):
    """What arrives: the shift from the previous rank in the ring, the parts of the node's ranks."""
    mover = Mover(world_of("cpu"), topology_of("abab"))
    sent = []
    whole = dist.batch_isend_irecv

    def watched(operations):
        sent.append([(op.op.__name__, op.peer) for op in operations])
        return whole(operations)

    dist.batch_isend_irecv = watched
    for link in Link:
        mover.shift(link, 8)()
    return sent, dist.get_process_group_ranks(mover.node_group)


def test_each_rank_sends_to_the_next_of_its_ring():
    for rank, (sent, node) in enumerate(run_ranks(moved, 4)):
        inside, across = (rank + 2) % 4, rank ^ 1
        assert sent == [[("isend", peer), ("irecv", peer)] for peer in (inside, across)]
        assert node == [rank % 2, rank % 2 + 2]


def test_the_command_writes_what_is_read(tmp_path):
    out = tmp_path / "machine.toml"
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    reader = Reader("test", str(out), "it is read", "correct it")
    found = reader.typed(Calibration, tomllib.loads(done.stdout))
    assert "measuring kernels and links" in done.stderr and done.stdout == out.read_text()
    assert found.gpu == "CPU" and kinds(found) == {"host"} and len(found.kernels) == 8


def test_a_file_that_cannot_be_written_is_said_in_a_sentence(tmp_path):
    out = str(tmp_path / "no" / "machine.toml")
    arguments = ["calibrate", "--device", "cpu", "--budget-s", "0", "--out", out]
    done = CliRunner().invoke(app, arguments)
    assert (
        done.exit_code == 2 and "error: calibrate: --out must name a writable file" in done.output
    )


def test_a_folder_as_out_is_refused_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "measuring" not in done.output
    assert "error: calibrate: --out must name a writable file" in done.output


def test_pretended_nodes_that_do_not_divide_the_ranks_are_refused():
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--nodes", "3"])
    assert done.exit_code == 2
    assert "error: calibrate: --nodes must divide the number of ranks" in done.output
