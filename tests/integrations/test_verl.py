"""verl: its plugins, its way of passing options to Megatron, and its packed samples.

Run by `make test-integrations FRAMEWORKS=verl`. Guards against a plugin that verl does not load, an
option that does not reach layers, and rows ordered differently than burst assumes.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_burst import next_tokens, token_log_probs
from tests.integrations.packed import LENGTHS, TOLERANCE, boundaries, core_of, documents, one_by_one
from tests.mcore.gpt import Model, Parallel, Run, _complete_grads, build, relative_errors, start
from tests.mcore.packed_sample import spec_of
from tests.ranks import preload, run_ranks

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: make test-integrations", allow_module_level=True)
preload("verl.workers.engine.megatron.transformer_impl", "verl.models.mcore.mbridge")

MEGATRON = "actor_rollout_ref.actor.megatron"
TYPED = f"+{MEGATRON}.override_transformer_config.cp_comm_type=burst"
IN_VERL = """
import verl
from megatron_burst.mcore import patches
import megatron.core.transformer.attention
print([patch.live for patch in patches.rows("attention")])
from verl.utils.import_utils import import_external_libs
import_external_libs("megatron_burst.auto")
print([patch.live for patch in patches.rows("attention")])
"""


@pytest.mark.parametrize("plugins, live", [("auto", True), ("none", False)])
def test_importing_verl_switches_burst_on(plugins, live):
    """Where verl's plugins are off, `model.external_lib` works."""
    done = subprocess.run(
        [sys.executable, "-c", IN_VERL], capture_output=True, text=True,
        env=os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.stdout.split("\n")[-3:-1] == [str([live] * 2), str([True] * 2)], done.stderr
    assert done.stderr.count("burst attention: layers with cp_comm_type=burst run it") == 1


def engine_config():
    """What verl makes of its command line."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        given = compose("ppo_megatron_trainer", [TYPED, f"{MEGATRON}.vanilla_mbridge=True"])
    assert given.actor_rollout_ref.ref.megatron.override_transformer_config.cp_comm_type == "burst"
    return omega_conf_to_dataclass(given.actor_rollout_ref.actor.megatron)


class Engine(SimpleNamespace):
    """The part of verl's engine that configures Megatron; everything else is off."""

    def __getattr__(self, name):
        return False


def megatron_config(engine, **options):
    """What verl's own method makes of that for Megatron; in float64."""
    from transformers import LlamaConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    llama = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = SimpleNamespace(
        model_type="language_model", share_embeddings_and_output_weights=False, hf_config=llama,
        mtp=SimpleNamespace(enable=False),
    )  # fmt: skip
    own = Engine(model_config=model, engine_config=engine)
    MegatronEngine._build_tf_config(own)
    return replace(
        own.tf_config, params_dtype=torch.float64, pipeline_dtype=torch.float64, bf16=False,
        use_cpu_initialization=True, masked_softmax_fusion=False, **options,
    )  # fmt: skip


def packed_by_verl(rank):
    """For a model that verl configures and runs on a batch that it packs: its layers; errors of
    loss and gradients; labels and log-probabilities of rows that have one, by verl and burst."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine

    engine = engine_config()
    start(Parallel())
    truth = one_by_one(build(megatron_config(engine, cp_comm_type=None), spec_of(Model())))
    start(Parallel(cp=2))
    gpt, seen = build(megatron_config(engine), spec_of(Model())), {}
    gpt.output_layer.register_forward_pre_hook(lambda _, given: seen.update(hidden=given[0]))
    tokens = torch.nested.nested_tensor(documents(), layout=torch.jagged)

    def log_probs_of(logits, label):
        log_probs = logits.log_softmax(-1).gather(-1, label[..., None])[..., 0]
        seen.update(label=label[0], log_probs=log_probs[0].detach())
        return {"log_probs": log_probs}

    whole = gptmodel_forward_model_engine(
        gpt, tokens, {}, log_probs_of, {"label": tokens}, data_format="thd"
    )["log_probs"]  # of all ranks' rows, with gradients of this rank's
    loss = -sum(document[:-1].sum() for document in whole.unbind())
    loss.backward()
    errors = relative_errors(Run(loss.detach(), _complete_grads(gpt)), truth)
    return core_of(gpt), errors, *labels_and_log_probs(tokens, gpt, **seen)


def labels_and_log_probs(tokens, gpt, hidden, label, log_probs):
    """For rows with a next token: whether verl's label equals burst's, log-probabilities by
    both."""
    from megatron.core import parallel_state
    from verl.models.mcore.util import preprocess_thd_engine

    rows, params, _ = preprocess_thd_engine(tokens)
    labels = next_tokens(
        rows[0], group=parallel_state.get_context_parallel_group(), layout="zigzag-documents",
        cu_seqlens=boundaries(), cu_seqlens_padded=params.cu_seqlens_q_padded,
    )  # fmt: skip
    burst = token_log_probs(hidden, gpt.output_layer.weight, labels[:, None], entropy=False)
    has = burst.mask[:, 0]
    return torch.equal(labels[has], label[has]), burst.log_probs[has, 0].detach(), log_probs[has]


def test_burst_gets_from_verls_command_line_into_megatron_and_verls_rows_are_bursts():
    rows = 0
    for core, errors, same, by_burst, by_verl in run_ranks(packed_by_verl, 2):
        assert core == "BurstCoreAttention" and same
        assert max(errors.values()) < TOLERANCE, errors
        torch.testing.assert_close(by_burst, by_verl, rtol=0, atol=TOLERANCE)
        rows += len(by_burst)
    assert rows == sum(LENGTHS) - len(LENGTHS)  # a document's last token has no next one
