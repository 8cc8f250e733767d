"""A whole job from inside: everybody there, alike, within reach, and links as fast as others."""

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.comm.grid import grid
from megatron_burst.comm.nodes import RankLocation, my_location, topology_of_locations
from megatron_burst.tools.doctor import compare
from megatron_burst.tools.doctor.machine import check_machine
from megatron_burst.tools.doctor.meeting import Launch, Meeting, meet, open_store, watched
from megatron_burst.tools.doctor.network import check_pairs, knock, own_address
from megatron_burst.tools.doctor.report import Check, LinkRate, Report, Status, merged
from megatron_burst.tools.doctor.software import software
from megatron_burst.tools.doctor.survey import Answer, Runner, Survey, survey_of
from megatron_burst.tools.speeds import Mover, matmul, rank_ms, rings
from megatron_burst.tools.terminal import Progress
from megatron_burst.tools.world import World, world_of

# what a rank says of itself, as JSON: its node, its GPU ("" without one), what should be the same
# on all nodes, its `RankLocation`, and the door where other nodes can knock
Facts = dict[str, Any]
_KNOCK_S = 5.0
_WATCHED = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_")
_SHIFT_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
_PRODUCT = {"cuda": (8192, torch.bfloat16), "cpu": (256, torch.float32)}


@dataclass(frozen=True, slots=True)
class Job:
    """How a job is checked."""

    run: Runner
    environ: Mapping[str, str]
    timeout_s: float  # ranks wait for each other in each step
    say: Callable[[Report], object]  # on rank 0
    progress: Progress = field(default_factory=Progress)


def check_job(launch: Launch, job: Job) -> bool:
    """Check a job, all its ranks together; rank 0 reports. Whether a run would break, on all ranks.

    Raises:
        BurstError: if this rank finds no store, or came too late.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    store = open_store(launch, job.timeout_s)
    survey = Answer(0, "", "the first rank of this node is not there")
    if launch.local_rank == 0:  # one rank of a node is enough
        survey = survey_of(job.run, job.timeout_s)
    own = own_address(launch.address, job.environ), 0
    with socket.create_server(own, backlog=1024) as door:  # connections to it are left waiting
        mine = _facts(launch, job, survey, door.getsockname()[:2])
        job.progress.now("waiting for all ranks")
        checks = _Checks(*meet(launch, store, job.timeout_s, mine), job)
        checks.before_groups(survey)
    if checks.may_measure:
        checks.measure()
    report = Report(checks.found, checks.links, ranks=checks.table)
    if launch.rank == 0:
        job.say(report)
    return checks.meeting.part(report.breaks)


def _facts(launch: Launch, job: Job, survey: Survey | Answer, door: tuple[str, int]) -> Facts:
    gpu_id, alike = "", software() | {"ranks": str(launch.local_size)}
    if torch.cuda.is_available():
        gpu_id = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    if isinstance(survey, Survey):
        alike |= compare.hardware_of(survey)
    alike |= {n: v for n, v in job.environ.items() if n.startswith(_WATCHED)}
    node = job.environ.get("NCCL_HOSTID") or socket.gethostname()
    return {
        "node": node, "gpu": gpu_id, "alike": alike, "home": asdict(my_location()), "door": door
    }  # fmt: skip


class _Checks:
    """Collects what is found; the same steps on all ranks, who said something of themselves."""

    def __init__(self, meeting: Meeting, facts: Mapping[int, Facts], job: Job) -> None:
        self.meeting, self.job, self.facts, self.ranks = meeting, job, facts, list(facts)
        self.nodes = {rank: fact["node"] for rank, fact in facts.items()}
        # the first rank of each node speaks for it
        self.speakers = {node: rank for rank, node in reversed(self.nodes.items())}
        self.found: list[Check] = []
        self.links: list[LinkRate] = []
        self.table = ""  # of the ranks, by node and rail

    @property
    def may_measure(self) -> bool:
        """Whether a process group of those who came can work; the same on all ranks."""
        stops = {"seats", "reachable"}
        broken = any(c.status is Status.FAIL and c.name in stops for c in self.found)
        return not broken and len(self.ranks) > 1

    def before_groups(self, survey: Survey | Answer) -> None:
        """What needs no process group; the first rank of each machine has its survey."""
        meeting, node = self.meeting, self.nodes[self.meeting.launch.rank]
        gpus = {rank: fact["gpu"] for rank, fact in self.facts.items()}
        self.found += [meeting.attendance(), compare.check_seats(gpus)]
        speaks = self.speakers[node] == meeting.launch.rank
        doors = {n: self.facts[rank]["door"] for n, rank in self.speakers.items() if n != node}
        reached = meeting.share("unreached", knock(doors, _KNOCK_S) if speaks else None)
        self.found.append(
            check_pairs({n: reached.get(rank, {}) for n, rank in self.speakers.items()})
        )
        own = check_machine(survey, self.job.environ, in_job=True) if speaks else []
        said = meeting.share("machine", [asdict(check) for check in own])
        self.found += merged({
            node: [Check(**fields | {"status": Status(fields["status"])})
                   for fields in said.get(rank, ())]
            for node, rank in self.speakers.items()
        })  # fmt: skip
        alike = {node: self.facts[rank]["alike"] for node, rank in self.speakers.items()}
        self.found += compare.check_alike(alike)

    def measure(self) -> None:
        """Compute and links, with a process group of those who came."""
        with self._watch("starting the process group"):
            world = self._world()
            topology = topology_of_locations(
                [RankLocation(**fact["home"]) for fact in self.facts.values()]
            )
            self.table = grid(topology, self.ranks)
            mover = Mover(world, topology)
        with self._watch("the matrix product"):
            run, flops = matmul(world, *_PRODUCT[world.device.type])
            ms = rank_ms(run, world)
        rates = {rank: flops / took / 1e9 for rank, took in zip(self.ranks, ms, strict=True)}
        self.found.append(compare.check_compute(rates, self.nodes))
        num_bytes = _SHIFT_BYTES[world.device.type]
        for link, found in rings(topology).items():
            links = []
            if found:
                with self._watch(f"the shift over {link} links"):
                    ms = rank_ms(mover.shift(link, num_bytes), world)
                took = dict(zip(self.ranks, ms, strict=True))
                own = [[self.ranks[place] for place in ring] for ring in found]
                links = compare.link_rates(link, own, took, num_bytes, self.nodes)
            self.links += links
            self.found.append(compare.check_links(link, links))
        dist.destroy_process_group()

    def _world(self) -> World:
        """The process group of those who came, numbered anew."""
        device = "cuda" if all(fact["gpu"] for fact in self.facts.values()) else "cpu"
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("doctor/group", self.meeting.store),
            rank=self.ranks.index(self.meeting.launch.rank), world_size=len(self.ranks),
            timeout=timedelta(seconds=2 * self.job.timeout_s),  # the watch comes first
        )  # fmt: skip
        return world_of(device)

    def _watch(self, stage: str) -> AbstractContextManager:
        self.job.progress.now(stage)
        return watched(self.meeting, stage, self._give_up)

    def _give_up(self, failure: Check) -> None:
        self.job.say(Report([*self.found, failure], self.links))
