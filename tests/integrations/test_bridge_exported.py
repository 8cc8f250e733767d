"""Models in files for GPUs without Megatron-Bridge, read in CPU mode.

Guards against a file that lacks what Megatron reads: the GPU would compute another model.
"""

import importlib.util

import pytest
import torch

from tests.ranks import preload, run_ranks

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed: make test-integrations", allow_module_level=True)
preload("megatron.bridge", "megatron.bridge.training.config")

from tests.integrations.export_logits import export  # noqa: E402
from tests.integrations.test_bridge_logits import EXACT, MODELS, OWN_LAYERS  # noqa: E402


def read(rank, path, dtype):
    """The largest and the median error, and core attentions."""
    from tests.integrations import te_on_cpu
    from tests.integrations.test_bridge import CP2, start
    from tests.mcore.exported import errors_of

    start(CP2)
    te_on_cpu.install()
    errors, cores = errors_of(path, dtype, "auto")
    return float(errors.max()), float(errors.median()), cores


@pytest.mark.parametrize("name", sorted(MODELS.keys() - OWN_LAYERS))
def test_a_model_in_a_file_has_the_logits_of_transformers(name, tmp_path):
    export(name, tmp_path)
    (path,) = tmp_path.iterdir()
    for most, middle, cores in run_ranks(read, 2, path, torch.float64):
        print(f"{name}: largest {most:.1e}, median {middle:.1e}")
        assert cores == {"BurstTECoreAttention"}
        assert most <= EXACT
