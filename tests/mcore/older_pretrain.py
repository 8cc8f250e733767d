"""examples/pretrain_gpt.py, written for Megatron 0.19, on older releases.

A script itself, and `provide` for processes that import the example. What the example imports from
Megatron is built from what those releases' own pretrain_gpt.py calls.
"""

import importlib
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from megatron_burst.installed import find_megatron, minor

EXAMPLES = Path(__file__).parents[2] / "examples"
IS_OLDER = minor(find_megatron().version) < (0, 19)
SCRIPT = Path(__file__) if IS_OLDER else EXAMPLES / "pretrain_gpt.py"


def provide() -> None:
    """Add to an older Megatron what the example imports; leave others unchanged."""
    if not IS_OLDER:
        return
    from megatron import training
    from megatron.core import utils
    from megatron.training import argument_utils, arguments

    argument_utils.gpt_config_from_args = lambda args: None
    if minor(find_megatron().version) < (0, 17):
        _move_tokenizers()
    if hasattr(arguments, "parse_and_validate_args"):  # 0.18
        training.pretrain = partial(_with_provider, training.pretrain)
        return
    added = {}  # 0.17 parses within pretrain()
    arguments.parse_and_validate_args = partial(_parse, added)
    argument_utils.pretrain_cfg_container_from_args = lambda args, model: added
    training.pretrain = partial(_with_flags, training.pretrain)
    utils.get_batch_on_this_cp_rank = partial(_shard, utils.get_batch_on_this_cp_rank)


def _move_tokenizers() -> None:
    """Move the tokenizer builder to where the example looks for it."""
    package = "megatron.core.tokenizers"
    own = importlib.import_module(f"{package}.text.utils.build_tokenizer")
    sys.modules[f"{package}.utils"] = sys.modules[f"{package}.utils.build_tokenizer"] = own


def _with_provider(pretrain, config, datasets, model_type, forward_step) -> None:
    pretrain(config, datasets, model_provider, model_type, forward_step)


def _parse(added: dict, add_arguments) -> Namespace:
    from megatron.training.arguments import parse_args

    added["extra_args_provider"] = add_arguments
    return parse_args(add_arguments)


def _with_flags(pretrain, added, datasets, model_type, forward_step) -> None:
    pretrain(datasets, model_provider, model_type, forward_step, **added)


def _shard(shard, batch, is_hybrid_cp, cp_group):
    return shard(batch, cp_group=cp_group)


def model_provider(pre_process=True, post_process=True, vp_stage=None, **given):
    """This rank's stage of a GPT, as those releases' `gpt_builder` makes it."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = given.get("config") or core_transformer_config_from_args(args)
    if args.num_experts:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=args.normalization)
    names = "position_embedding_type", "rotary_percent", "rotary_base", "fp16_lm_cross_entropy"
    return GPTModel(
        config, spec, args.padded_vocab_size, args.max_position_embeddings, pre_process,
        post_process, vp_stage=vp_stage,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        **{name: getattr(args, name) for name in names},
    )  # fmt: skip


def main() -> None:
    """Train, in the process that runs this script."""
    import torch

    if not torch.cuda.is_available():
        from megatron_burst.tools import cpu_mode

        cpu_mode.install()
    provide()
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt

    pretrain_gpt.main()


if __name__ == "__main__":
    main()
