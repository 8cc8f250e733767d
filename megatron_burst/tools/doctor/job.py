"""A whole job from inside: everybody there, alike, and transfers between all of them.

A collective that waits for a lost rank cannot be called off; on GPUs it blocks for minutes. So
transfers run in a thread, and ranks tell each other through a store how far theirs came.
"""

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.comm.nodes import RankLocation, my_location, topology_of_locations
from megatron_burst.errors import require
from megatron_burst.tools.doctor.machine import check_machine
from megatron_burst.tools.doctor.meeting import Launch, Meeting, open_store
from megatron_burst.tools.doctor.nodes import check_alike, hardware_of
from megatron_burst.tools.doctor.report import Check, breaks, fail, few, merged, ok, skip
from megatron_burst.tools.doctor.software import software
from megatron_burst.tools.doctor.survey import survey_of
from megatron_burst.tools.speeds import Mover
from megatron_burst.tools.world import world_of

# of each rank, as JSON: node, GPU ("" for none), what all nodes share, location, a node's checks
Facts = Mapping[int, Mapping[str, Any]]
_COMPARED = ("NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_")


def check_job(launch: Launch, timeout_s: float, say: Callable[[list[Check]], None]) -> list[Check]:
    """Check a job, all its ranks together: the same checks on all of them, which rank 0 says before
    any rank ends. A thread may be left that hangs in a transfer.

    Raises:
        BurstError: if this rank finds no store, or came too late.
    """
    _use_gpu_of(launch)
    meeting = Meeting(launch, open_store(launch, timeout_s), timeout_s)
    facts = meeting.gather("facts", _my_facts(launch, timeout_s))
    need = (
        launch.rank in facts, "all ranks must arrive in time, because they check each other",
        f"rank {launch.rank} after rank 0 had counted {len(facts)}", "raise --timeout-s",
    )  # fmt: skip
    require("doctor", [need])
    seats = check_seats({rank: fact["gpu"] for rank, fact in facts.items()})
    checks = [check_attendance(launch, facts, timeout_s), seats]
    first = {fact["node"]: fact for fact in reversed(facts.values())}  # it speaks for its node
    checks += merged({n: [Check(**check) for check in f["checks"]] for n, f in first.items()})
    checks += check_alike({node: fact["alike"] for node, fact in first.items()})
    if len(facts) == launch.size > 1 and not breaks([seats]):
        checks.append(_Transfers(meeting, facts).check())
    if launch.rank == 0:
        say(checks)
    meeting.part(facts)
    return checks


def _use_gpu_of(launch: Launch) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())


def _my_facts(launch: Launch, timeout_s: float) -> dict[str, Any]:
    gpu, alike, checks = "", software() | {"ranks": str(launch.local_size)}, []
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    if launch.local_rank == 0:  # one rank of a node is enough
        survey = survey_of(timeout_s)
        checks = [asdict(check) for check in check_machine(survey)]
        alike |= hardware_of(survey) if "end" in survey else {}
    alike |= {n: v for n, v in os.environ.items() if n.startswith(_COMPARED)}
    node = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    location = asdict(my_location())
    return {"node": node, "gpu": gpu, "alike": alike, "location": location, "checks": checks}


def check_attendance(launch: Launch, facts: Facts, timeout_s: float) -> Check:
    """Who is missing, and where they should be."""
    missing = [rank for rank in range(launch.size) if rank not in facts]
    if not missing:
        return ok("attendance", f"all {launch.size} ranks are there")
    nodes = ", ".join(sorted({f"node {rank // launch.local_size}" for rank in missing}))
    what = f"ranks {missing} of {launch.size} did not come within {timeout_s:g} s"
    change = f"make sure that {nodes} runs them and reaches {launch.address}:{launch.port}"
    return fail("attendance", what, change, nodes)


def check_seats(gpus: Mapping[int, str]) -> Check:
    """That each rank has a GPU of its own; "" of a rank without one."""
    counts = Counter(gpus.values())
    if not any(counts):
        return skip("seats", "no rank has a GPU: the job runs on the CPU")
    if without := [rank for rank, gpu in gpus.items() if not gpu or counts[gpu] > 1]:
        what = f"ranks {without} have no GPU of their own"
        return fail("seats", what, "start no more ranks on a node than it has GPUs")
    return ok("seats", f"each of {len(gpus)} ranks has a GPU of its own")


class _Transfers:
    """A process group of all ranks, and a shift along each ring of it."""

    def __init__(self, meeting: Meeting, facts: Facts) -> None:
        self.meeting, self.facts = meeting, facts
        self.stage, self.error = "starting the process group", ""  # stage: "" at the end

    def check(self) -> Check:
        """Run them; who did not come to the end, and why, as the ranks say."""
        thread, limit_s = Thread(target=self._run, daemon=True), self.meeting.timeout_s
        thread.start()
        thread.join(limit_s)
        reports = self.meeting.gather("transfers", (self.stage, self.error), patience=2.0)
        ends = {rank: reports.get(rank, ("transfers", "it ended")) for rank in self.facts}
        late = {rank: error for rank, (stage, error) in ends.items() if stage}
        if not late:
            return ok("transfers", f"{len(ends)} ranks reach each other along all rings")
        stages = " or ".join(sorted({stage for stage, _ in ends.values()} - {""}))
        at = {rank: f"rank {rank} on {self.facts[rank]['node']}" for rank in late}
        why = [f"{at[rank]}: {error}" for rank, error in late.items() if error]
        what = few([f"ranks {[*late]} did not finish {stages} within {limit_s:g} s", *why])
        change = "check routes, firewalls and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
        return fail("transfers", what, change, few([*at.values()]))

    def _run(self) -> None:
        launch, timeout_s = self.meeting.launch, self.meeting.timeout_s
        device = "cuda" if all(fact["gpu"] for fact in self.facts.values()) else "cpu"
        locations = [RankLocation(**fact["location"]) for fact in self.facts.values()]
        try:
            _use_gpu_of(launch)  # each thread has a current GPU of its own
            # a connection of its own: a connection that waits has a lock
            store = dist.PrefixStore("group", open_store(replace(launch, joins=True), timeout_s))
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo", store=store, rank=launch.rank,
                world_size=launch.size, timeout=timedelta(seconds=5 * timeout_s),
            )  # fmt: skip
            world = world_of(device)
            mover = Mover(world, topology_of_locations(locations))
            for link in mover.rings:
                self.stage = f"the shift over {link} links"
                mover.shift(link, 1 << 20)()  # bytes
                world.synchronize()
                world.barrier()
            dist.destroy_process_group()
            self.stage = ""
        except Exception as error:  # of any kind: a rank is gone, or cannot be reached
            self.error = str(error).partition("\n")[0][:200]
