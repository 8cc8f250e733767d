"""NeMo-RL with burst. It is not on the registry: functions of its files at commit 7ea279a (main, 22
August 2026) are run from a clone, with the released Megatron-Bridge and Ray.

Guards against overrides that NeMo-RL no longer accepts, samples that it packs differently, and
workers that do not import the plugin.
"""

import ast
import dataclasses
import importlib
import os
import subprocess
import sys
import typing
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from tests.mcore.gpt import VOCAB, Parallel
from tests.ranks import run_ranks

pytest.importorskip("ray", reason="Ray is not installed: make test-integrations")
bridge = pytest.importorskip("tests.integrations.test_bridge")  # skips where Bridge is missing

COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
SETUP, DATA = "models/megatron/setup.py", "models/megatron/data.py"
COMMON = "models/megatron/common.py"
SHARDING, POLICY = "distributed/model_utils.py", "models/policy/__init__.py"
LENGTHS = 13, 24, 6


def policy(parallel):
    """The part of NeMo-RL's configuration that sets parallelism."""
    sizes = dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
        sequence_parallel=False, context_parallel_size=parallel.cp,
    )  # fmt: skip
    return {"megatron_cfg": sizes, "sequence_packing": {"enabled": True}}


def definitions(path, *names):
    """Functions and classes of a NeMo-RL file as syntax, since it imports vLLM and more."""
    shown = subprocess.run(
        ["git", "-C", os.environ["NEMO_RL"], "show", f"{COMMIT}:nemo_rl/{path}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [node for node in ast.parse(shown.stdout).body if getattr(node, "name", "") in names]
    assert len(found) == len(names)
    return found


def functions(path, *names, **others):
    """Such functions, callable; `others`: what else they call."""
    from megatron.core.packed_seq_params import PackedSeqParams

    scope = vars(typing) | vars(dataclasses) | dict(torch=torch, Mapping=Mapping, PolicyConfig=dict)
    scope |= dict(PackedSeqParams=PackedSeqParams) | others
    exec(compile(ast.Module(definitions(path, *names), []), path, "exec"), scope)
    return [scope[name] for name in names]


def model_of(parallel, overrides):
    """What NeMo-RL makes of Bridge's provider, and the model."""
    merge, _, apply = functions(
        SETUP, "_merge_model_overrides", "_merge_model_override_value", "_apply_parallelism_config"
    )
    provider = bridge.hugging_face_provider("Llama", Parallel())
    if overrides:
        provider = merge(provider, overrides)
    apply(provider, policy(parallel))
    return bridge.built(provider)


def samples():
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=generator)
    weights = torch.randn(*tokens.shape, VOCAB, generator=generator, dtype=torch.float64)
    return tokens, weights


def alone():
    """Gradients of a weighted sum of logits, each document on its own, without burst."""
    bridge.start(Parallel())
    gpt = model_of(Parallel(), {})
    tokens, weights = samples()
    total = 0.0
    for document, weight, length in zip(tokens, weights, LENGTHS, strict=True):
        positions = torch.arange(length)[None]
        logits = gpt(document[None, :length], positions, attention_mask=None)
        total += (logits[0] * weight[:length]).sum()
    total.backward()
    return total.detach(), {name: p.grad for name, p in gpt.named_parameters()}


def packed(rank):
    """Errors of the same for one packed sample, by NeMo-RL's functions; what the layers run."""
    (shard,) = functions(SHARDING, "_get_tokens_on_this_cp_rank")
    (round_up,) = functions(COMMON, "_round_up_to_multiple")
    pack, pads_of = functions(
        DATA, "_pack_sequences_for_megatron", "_get_pack_sequence_parameters_for_megatron",
        _round_up_to_multiple=round_up, _get_tokens_on_this_cp_rank=shard,
    )  # fmt: skip
    importlib.import_module("megatron_burst.auto")
    truth, grads = alone()
    parallel = Parallel(cp=2)
    bridge.start(parallel)
    gpt = model_of(parallel, {"cp_comm_type": "burst"})
    tokens, weights = samples()
    pads = pads_of(policy(parallel)["megatron_cfg"], 4, max(LENGTHS))
    _, mine, parameters, _, _ = pack(tokens, torch.tensor(LENGTHS), *pads, cp_rank=rank, cp_size=2)
    logits = gpt(mine, None, attention_mask=None, packed_seq_params=parameters)[0]
    rows = []
    for weight, length in zip(weights, LENGTHS, strict=True):
        padded = torch.zeros(-(-length // 4) * 4, VOCAB, dtype=torch.float64)
        padded[:length] = weight[:length]
        rows.append(shard(padded, rank, 2, seq_dim=0))
    total = (logits * torch.cat(rows)).sum()
    total.backward()
    dist.all_reduce(total := total.detach())
    errors = [abs(total - truth) / abs(truth)]
    for name, parameter in gpt.named_parameters():
        dist.all_reduce(parameter.grad)
        errors.append((parameter.grad - grads[name]).abs().max() / grads[name].abs().max())
    return float(max(errors)), bridge.cores_of(gpt)


needs_clone = pytest.mark.skipif(
    "NEMO_RL" not in os.environ,
    reason="NEMO_RL must be a clone of NeMo-RL, which is in no registry",
)


@needs_clone
def test_cp_comm_type_is_no_setting_of_nemo_rls_own():
    """NeMo-RL refuses its own settings as model overrides (setup.py:756)."""
    (config,) = definitions(POLICY, "MegatronConfig")
    fields = {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)}
    assert "context_parallel_size" in fields and "cp_comm_type" not in fields


@needs_clone
def test_packed_samples_of_nemo_rl_run_burst_by_an_override_of_the_model():
    """Documents of 13, 24 and 6 tokens, padded to 4 each, over 2 ranks."""
    for error, cores in run_ranks(packed, 2):
        assert error <= bridge.EXACT and cores == ["BurstTECoreAttention"] * 2


def test_ray_imports_the_plugin_in_every_worker(monkeypatch):
    """As NeMo-RL starts it: workers have the driver's variables and their own Python."""
    import ray

    monkeypatch.setenv("RAY_preload_python_modules", "megatron_burst.auto")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    monkeypatch.setenv("MEGATRON_BURST", "keep=all")
    try:
        ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": dict(os.environ)})
        worker = ray.remote(Worker).options(runtime_env={"py_executable": sys.executable})
        assert ray.get(worker.remote().look.remote()) == ("keep=all", True, False)
    finally:
        ray.shutdown()


class Worker:
    """Inspects its process before it has done anything."""

    def look(self):
        loaded = "megatron_burst.auto" in sys.modules
        return os.environ.get("MEGATRON_BURST"), loaded, "megatron.core" in sys.modules
