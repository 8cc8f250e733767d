"""Runs scripts on ranks, as torchrun does, in processes that are forked with torch loaded, but
neither Megatron nor burst: all imports whose order matters to burst are the script's own. torch
takes 3 of the 6 seconds of a core that a rank otherwise imports for.

    python -m tests.mcore.forked_scripts RUNS

RUNS is a JSON list of `Script`s, of two ranks each.
"""

import json
import os
import runpy
import sys
from dataclasses import dataclass

import torch._dynamo  # noqa: F401  (what Megatron imports of torch)
import torch._inductor.compile_fx  # noqa: F401  (with its first @jit_fuser)
import torch.distributed._tensor  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.tensor.experimental  # noqa: F401


@dataclass(frozen=True)
class Script:
    """A run.

    Attributes:
        argv: the script and its arguments.
        folder: it runs in, which gets output.txt.
        path: folders in front of others on sys.path.
        port: of the store where its ranks meet.
    """

    argv: list[str]
    folder: str
    path: list[str]
    port: int


def main(runs: list[Script], ranks: int = 2) -> int:
    """Run all at the same time; returns 0 if every rank of every run ended well."""
    loaded = [name for name in sys.modules if name.startswith("megatron")]
    assert not loaded, loaded
    children = [_fork(run, rank, ranks) for run in runs for rank in range(ranks)]
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def _fork(run: Script, rank: int, ranks: int) -> int:
    if child := os.fork():
        return child
    os.chdir(run.folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    os.environ |= {"LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": f"{run.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    sys.argv = run.argv
    sys.path[:0] = [os.path.dirname(run.argv[0]), *run.path]
    runpy.run_path(run.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.exit(main([Script(**run) for run in json.loads(sys.argv[1])]))
