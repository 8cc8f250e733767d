"""What a faulty rank does, and a step of a model in which it does it: both run on every rank."""

import os
import signal
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import checkpoint

from megatron_burst import call
from megatron_burst.attention import burst_attention
from megatron_burst.comm.detector import DesyncDetector
from megatron_burst.comm.group import check_in_step
from megatron_burst.config import BurstConfig
from megatron_burst.engine.operations import ref_fields
from megatron_burst.errors import BurstError
from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.spec import Direction
from tests.attention.failing import NoMemoryError, fail, failing
from tests.attention.test_processes import inputs, truth_of, worst
from tests.faults.table import FAULTS, MODES, ODD, TIMEOUT_S, WORLD, Case
from tests.options import burst_config
from tests.oracle import rows_of

HEADS = (8, 4)
SLOW_S = 1.5


def raises(step, op, binder, run):
    raise RuntimeError("a wrong turn")


def no_memory(step, op, binder, run):
    fail()


def dies(step, op, binder, run):
    os.kill(os.getpid(), signal.SIGKILL)


def stops(step, op, binder, run):
    """Until the others have given up."""
    dist.group.WORLD.get_group_store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    return step.run(run)


def waits(seconds, step, op, binder, run):
    time.sleep(seconds)
    return step.run(run)


def is_nan(step, op, binder, run):
    step.run(run)
    for ref in op.writes:
        for x in ref_fields(binder, ref)(run).values():
            x.fill_(torch.nan)


def cuts(sockets, step, op, binder, run):
    for number in sockets:
        with suppress(OSError):
            joined = socket.socket(fileno=os.dup(number))
            joined.shutdown(socket.SHUT_RDWR)
            joined.close()
    return step.run(run)


def descriptors():
    return {int(name) for name in os.listdir("/proc/self/fd")}


class Model:
    """One layer; `numbers` are the errors of what it computed, in turn."""

    def __init__(self, rank, case):
        before = descriptors()
        self.group = dist.new_group()
        self.config = burst_config(**MODES[case.mode])
        self.tensors = inputs(WORLD, 4, HEADS, (4, 4), torch.float64)
        self.truth = truth_of(self.tensors, True, 0.5)
        self.rows, self.numbers = rows_of(Layout.ZIGZAG, rank, WORLD, 4), []
        self._before = before

    def be_impatient(self):
        """Give up soon, once groups are made, which takes long on busy cores."""
        distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), self.group)

    def sockets(self):
        return descriptors() - self._before

    def note(self, found, other):
        """The errors of out, or of dq, dk and dv, unless they are of another shape."""
        truth = self.truth[:1] if len(found) == 1 else self.truth[1:]
        for mine, right in zip(found, truth, strict=True) if not other else ():
            self.numbers.append(worst([mine], [right], self.rows))

    def step(self, tokens=None, dtype=None, causal=True, **changes):
        q, k, v = (x[:, self.rows].to(dtype).requires_grad_() for x in self.tensors[:3])
        if tokens:
            q, k, v = (
                torch.randn_like(x[:, :1].repeat(1, tokens, 1, 1), requires_grad=True)
                for x in (q, k, v)
            )
        options = {
            "config": replace(self.config, **changes),
            "group": self.group,
            "layer": 7,
            "causal": causal,
        }
        out = burst_attention(q, k, v, **options)
        self.note([out.detach()], tokens)
        dout = self.tensors[3][:, self.rows] if not tokens else torch.ones_like(out)
        grads = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
        self.note(grads, tokens)
        check_in_step(self.group)


ACTS = {
    "killed": dies, "stopped": stops, "stuck": partial(waits, TIMEOUT_S + 2),
    "slow": partial(waits, SLOW_S), "raises": raises, "no memory": no_memory,
    "no memory anywhere": no_memory, "NaN": is_nan, "full disk": dies,
}  # fmt: skip
OTHER_CALLS = {
    "flag": {"deterministic": True}, "shape": {"tokens": 8}, "dtype": {"dtype": torch.float32},
    "mask": {"causal": False},
}  # fmt: skip


@contextmanager
def hit(rank, case, model):
    """A context in which the fault comes; gives what the rank's call has instead."""
    with ExitStack() as stack:
        here = rank == ODD or case.fault == "no memory anywhere"
        act = ACTS.get(case.fault)
        if case.fault == "cut off":
            act = partial(cuts, model.sockets())
        if here and act:
            direction = Direction(case.direction)
            stack.enter_context(failing(direction, case.place, act=act))
        if here and case.fault == "version":
            stack.enter_context(patch.object(call, "__version__", "0.0.0"))
        yield OTHER_CALLS.get(case.fault, {}) if here else {}


def told_in(step):
    """What a step raises; "" if nothing."""
    try:
        step()
    except (BurstError, NoMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
    return ""


def suffer(rank, case: Case, folder: str):
    """What a rank is told, after how many seconds, the numbers that it got, and what it gets when
    all call again."""
    os.environ["MEGATRON_BURST_FAULTS"] = folder
    DesyncDetector.max_all_to_all_ranks = (
        len(f"{case}") % 2 * WORLD
    )  # half of the cases compare stamps around the ring
    model, again = Model(rank, case), ""
    if case.fault == "checkpoints":
        return of_history(rank, model)
    if case.fault != "version":
        model.step()
    model.be_impatient()
    dist.barrier()
    begun = time.monotonic()
    with hit(rank, case, model) as instead:
        told = told_in(partial(model.step, **instead))
    took = time.monotonic() - begun
    if case.fault == "stopped" and rank != ODD:
        wake()
    if FAULTS[case.fault].again:
        again = told_in(model.step)
    return told, took, model.numbers, again


def wake():
    """The last of the ranks that gave up lets the stopped one go on."""
    store = dist.group.WORLD.get_group_store()
    if store.add("gave up", 1) == WORLD - 1:
        os.kill(int(store.get("stopped")), signal.SIGCONT)


def of_history(rank, model):
    """As `suffer`: one rank has run a checkpoint before, alone, so only it is set up to keep."""
    alone = [dist.new_group([each]) for each in range(WORLD)][rank]
    x = torch.randn(2, 8, 4, 8, requires_grad=True)

    def step(group, config):
        run = partial(burst_attention, group=group, config=replace(config, keep="all"))
        out = checkpoint(lambda x: run(x * 1, x[:, :, :4] * 1, x[:, :, :4] * 2), x,
                         use_reentrant=False)  # fmt: skip
        torch.autograd.grad(out.square().sum(), x)

    if rank == ODD:
        step(alone, BurstConfig())
    begun = time.monotonic()
    told = told_in(partial(step, model.group, model.config))
    took = time.monotonic() - begun
    return told, took, [], told_in(partial(step, model.group, model.config))
