"""What burst does not support: one table, checked against arguments, configurations, layers, calls
and models.

Every entry point calls `refuse`. Nothing here loads Megatron.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_burst.errors import BurstError, nearest_multiples
from megatron_burst.installed import find_megatron
from megatron_burst.mcore.offsets import mamba_fits, rope_fits

FLAG, KEEP_FLAG = "--context-parallel-impl burst", "--burst-keep"
LOSS_FLAG = "--burst-fused-loss"
OFF = (False, "none", [], ())
# of a transformer layer, Megatron's names: dense layers, latent attention, experts and what sends
# tokens to them
KEEP_MODULES = frozenset(
    "linear_qkv linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj "
    "linear_kv_up_proj linear_proj linear_fc1 router token_dispatch".split()
)
# Megatron shards these layers itself; the first name is that of 0.18 and 0.19, and from 0.20 on is
# read as the second
DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")

_NO_DISPATCH = "leave token_dispatch out of keep_modules"

type Options = Any  # anything with Megatron's field names: arguments, a configuration, a view


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values of one option that features of burst do not support."""

    features: str  # that refuse it, separated by spaces; see `check`
    argument: str  # Megatron's name of the option
    # supported values, besides None; or a predicate of the value and all options
    allowed: Container[object] | Callable[[Any, Options], bool]
    why: str  # the other values are refused
    change: str | Callable[[Options], str] = "leave it out"  # what to do
    option: str = ""  # the option in words; if empty, the argument as a flag
    # template of what was got, with `{value}`, `{words}` (of a list) and `{o.other_argument}`; if
    # empty, the argument and its value
    got: str = ""

    @property
    def named(self) -> str:
        """The option, as a user writes it."""
        return self.option or f"--{self.argument.replace('_', '-')}"

    def value_in(self, options: Options) -> object | None:
        """The value if it is refused (by name if an enum, "None" if missing), else None."""
        value = getattr(options, self.argument, None)
        value = getattr(value, "name", value)
        if callable(self.allowed):
            return None if self.allowed(value, options) else repr(value) if value is None else value
        return None if value is None or value in self.allowed else value

    def sentence(self, who: str, value: object, options: Options) -> str:
        words = " ".join(map(str, value)) if isinstance(value, list) else value
        got = self.got or f"{self.argument}={{value}}"
        got = got.format(value=value, words=words, o=options)
        change = self.change if isinstance(self.change, str) else self.change(options)
        return f"{who}: cannot run with {self.named}, because {self.why}; got {got}; {change}"


def refuse(feature: str, options: Options, who: str, skip: Container[str] = ()) -> None:
    """Refuse options that a feature of burst would ignore or get wrong.

    Args:
        feature: "command" (burst attention, of a command line), "run" (also where models are built,
            when a script may have changed arguments), "attention" (also of a configuration or
            a layer), "invariant" (beside batch-invariant kernels), "built" (once arguments are
            set), "model", "spec", "call", "cache";
            "recompute" (anything kept or offloaded), "keep", "half" (of the rows is kept),
            "modules" (whose outputs are kept), "own" (Megatron's attention); "loss" (the fused
            one), "head"; "cpu" (CPU mode).
        options: Megatron's arguments, or anything with fields of the same names; missing fields are
            not checked.
        who: for the message.
        skip: arguments that are checked elsewhere.
    """
    for row in _rows(feature):
        value = None if row.argument in skip else row.value_in(options)
        if value is not None:
            raise BurstError(row.sentence(who, value, options))


def refuses(feature: str, argument: str, options: Options) -> bool:
    """Whether a feature refuses the value of one argument."""
    rows = (row for row in _rows(feature) if row.argument == argument)
    return any(row.value_in(options) is not None for row in rows)


@cache
def _rows(feature: str) -> tuple[Refusal, ...]:
    return tuple(row for row in TABLE if feature in row.features.split())


def names_burst(cp_comm_type: str | list[str] | None) -> bool:
    """Whether a configuration's `cp_comm_type` has a layer run burst."""
    return "burst" in ([cp_comm_type] if isinstance(cp_comm_type, str) else cp_comm_type or ())


def _fits_zigzag(tokens: int | None, o: Options) -> bool:
    cp_size = o.context_parallel_size
    return cp_size == 1 or tokens is None or tokens % (2 * cp_size) == 0


def _must_run_burst(o: Options) -> bool:
    """Whether the flag means this model: towers hold whole samples."""
    causal = getattr(o, "attn_mask_type", None) in _MASKS[::2]
    return o.context_parallel_size > 1 or causal


def _invariant(o: Options) -> bool:
    """Whether burst's bits are the same on any number of ranks."""
    return bool(getattr(o, "burst_invariant", False))


def _keeps_dispatch(o: Options) -> bool:
    """Whether tokens that other ranks sent are kept."""
    return "token_dispatch" in getattr(o, "burst_keep_modules", ())


def _selective(o: Options) -> bool:
    """Whether Megatron will recompute selectively."""
    kind = o.recompute_granularity
    return kind == "selective" or (not kind and getattr(o, "recompute_activations", False))


def _on_gpus(name: str, needed: str, allowed: Container[object] = OFF, option: str = "") -> Refusal:
    """A row for CPU mode."""
    why, change = f"only GPUs have {needed}", "leave it out, or run on GPUs"
    return Refusal("cpu", name, allowed, why, change, option)


CUDA_GRAPHS = "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"  # by release
_BESIDE_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess", "mamba"}
_IN_WHOLE_LAYERS = {"mlp", "moe"}  # in Megatron's own graphs (transformer/transformer_layer.py:562)
# by release; first that of 0.18 and 0.19 before their parser moves the value
_CAPTURED = "cuda_graph_scope_deprecated", "cuda_graph_scope", "cuda_graph_modules"


# what Python code reads after attention, and its name if it is no flag
_READ_IN_PYTHON = {
    "qk_clip": "", "log_max_attention_logit": "", "burst_log": "", "burst_check": "check",
    "burst_nan_guard": "nan_guard",
}  # fmt: skip


def _captured(o: Options) -> set[str]:
    """Parts of the model captured in CUDA graphs; empty means whole layers."""
    named = next(filter(None, (getattr(o, name, None) for name in _CAPTURED)), [])
    parts = named.split(",") if isinstance(named, str) else named
    return {getattr(part, "name", part) for part in (parts if isinstance(parts, list) else [parts])}


def _spares_attention(impl: object, o: Options) -> bool:
    """Whether no CUDA graph of Megatron's captures attention, which in hybrids has layers of its
    own."""
    parts, beside = _captured(o), _BESIDE_ATTENTION
    local = impl == "local" or getattr(o, "enable_cuda_graph", False)
    if local and not getattr(o, "hybrid_layer_pattern", None):
        beside = beside - _IN_WHOLE_LAYERS
    return impl in (None, *OFF) or (impl != "full_iteration" and bool(parts) and parts <= beside)


def _is_captured(o: Options) -> bool:
    """Whether some CUDA graph captures attention."""
    return not all(_spares_attention(getattr(o, name, None), o) for name in CUDA_GRAPHS)


def _captures_layers(impl: object, o: Options) -> bool:
    """Whether no CUDA graph captures a whole iteration, with the loss."""
    return impl in (None, *OFF) or "full_iteration" not in {impl, *_captured(o)}


def _cuda_graphs() -> Iterator[Refusal]:
    spared = ("capture only parts other than attention (--cuda-graph-modules, in older releases "
              "--cuda-graph-scope: moe_router, moe_preprocess, mamba, and with transformer_engine "
              "or in hybrids mlp and moe)")  # fmt: skip
    for name, option in _READ_IN_PYTHON.items():
        yield Refusal("attention", name, lambda on, o: not (on and _is_captured(o)), "a CUDA graph "
                      "that holds attention reruns kernels without the Python code that reads "
                      "scores, results and times", f"leave one of them out, or {spared}",
                      option)  # fmt: skip
    yield Refusal("attention", "cuda_graph_warmup_steps",
                  lambda steps, o: steps != 0 or not _is_captured(o),
                  "graphs do not check masks, and a step without graphs does",
                  "pass --cuda-graph-warmup-steps 1 or more")  # fmt: skip
    for name in CUDA_GRAPHS:
        yield Refusal("attention", name, _captures_layers, "burst is tested in graphs of layers, "
                      "and not in those of a whole iteration",
                      "capture layers (--cuda-graph-impl local or transformer_engine)")  # fmt: skip
        yield Refusal("recompute", name, _spares_attention, "CUDA graphs rerun kernels without "
                      "the Python code that returns the kept results",
                      f"leave it out, or {spared}")  # fmt: skip
        yield Refusal("loss head", name, _captures_layers, "unmasked tokens are counted on the CPU",
                      "leave it out, or capture layers only")  # fmt: skip
        yield _on_gpus(name, "CUDA graphs")


def _by_spec(name: str, allowed, why: str) -> Iterator[Refusal]:
    change = f"start the script with python -m megatron_burst and {FLAG} instead of --spec"
    yield Refusal("spec", name, allowed, f"{why}, and --spec does not patch Megatron", change)


def shards_documents() -> bool:
    """Whether Megatron's pretrain_hybrid.py shards packed samples document by document, wherever
    they begin: from #6912 on. Each sample's parameters say so (`packed.is_sharded_whole`)."""
    megatron = find_megatron()
    return bool(megatron) and (megatron.folder / "core/context_parallel/utils.py").exists()


def needs_documents(o: Options) -> bool:
    """Whether the model has parts that expect packed samples to be sharded document by document."""
    yarn = getattr(o, "rope_type", None) == "yarn" and getattr(o, "apply_rope_fusion", False)
    fused_yarn = yarn and getattr(o, "multi_latent_attention", False)
    linear = {*"MG"} & {*(getattr(o, "hybrid_layer_pattern", None) or "")}
    delta = getattr(o, "experimental_attention_variant", None) in DELTA_NETS
    return bool(fused_yarn or linear or delta or getattr(o, "mtp_num_layers", None))


_WITHOUT = "train this model without burst"
_MASKS = ("causal", "no_mask", "padding_causal", "padding")
_OTHER_MASKS = "masks other than causal and none are not supported"
_OTHER_KEYS = "keys of another sample"
_NO_MASK = "pass --no-create-attention-mask-in-dataloader"

TABLE: tuple[Refusal, ...] = (
    # burst attention: command line
    Refusal("command", "seq_length", _fits_zigzag, "zigzag gives each rank two chunks, so the "
        "length must be divisible by twice the context parallel size",
        lambda o: f"choose a {nearest_multiples(o.seq_length, 2 * o.context_parallel_size)}",
        "this --seq-length",
        "--seq-length {value} and --context-parallel-size {o.context_parallel_size}"),
    Refusal("run", "burst_nodes",
        lambda nodes, o: nodes is None or (nodes >= 1 and o.context_parallel_size % nodes == 0),
        "nested rings need equally many ranks on each node, so the number of nodes must divide the "
        "context parallel size",
        lambda o: f"choose among the divisors of {o.context_parallel_size}",
        option="this --burst-tune",
        got="--burst-tune nodes={value} and --context-parallel-size {o.context_parallel_size}"),
    Refusal("run", "hierarchical_context_parallel_sizes", OFF,
        "burst finds out itself which ranks share a node",
        "leave it out, or pass --burst-tune nodes=N",
        got="--hierarchical-context-parallel-sizes {words}"),
    Refusal("run", "cp_comm_type", lambda kinds, o: kinds in (None, ["p2p"]) or "burst" in kinds,
        "no layer runs burst unless burst is among the values",
        "leave it out, or name burst for the layers that should run it", "this --cp-comm-type",
        got="--cp-comm-type {words}"),
    Refusal("run", "hybrid_layer_pattern", lambda layers, o: not layers or set("*+") & set(layers),
        "it has no attention layer (* or +) that could run burst", f"leave out {FLAG}",
        "this --hybrid-layer-pattern", "--hybrid-layer-pattern {value}"),
    Refusal("run", "apply_rope_fusion", rope_fits,
        "its kernels count elements in 32 bits, and read out of bounds if a rank's Q, K and V have "
        "over 2^31 elements",
        "pass --no-rope-fusion, or train with more context or tensor parallel ranks",
        option="fused RoPE",
        got="apply_rope_fusion={value} with --seq-length {o.seq_length}, --micro-batch-size "
        "{o.micro_batch_size}, {o.num_attention_heads} query heads, and context and tensor "
        "parallel sizes {o.context_parallel_size} and {o.tensor_model_parallel_size}"),
    Refusal("run", "mamba_state_dim", mamba_fits,
        "the kernels of mamba_ssm count elements in 32 bits, and read out of bounds if a rank's "
        "projections of a whole sample have over 2^31 elements",
        "train with more context or tensor parallel ranks, or with a mamba_ssm that counts in 64 "
        "bits",
        option="Mamba layers",
        got="--seq-length {o.seq_length}, --micro-batch-size {o.micro_batch_size}, "
        "--mamba-state-dim {value}, --mamba-head-dim {o.mamba_head_dim}, --mamba-num-groups "
        "{o.mamba_num_groups}, and context and tensor parallel sizes {o.context_parallel_size} and "
        "{o.tensor_model_parallel_size}"),
    Refusal("built", "create_attention_mask_in_dataloader", OFF,
        "causal attention needs no mask tensor, and other masks are not supported", _NO_MASK),
    Refusal("model", "cp_comm_type", lambda kinds, o: names_burst(kinds) or not _must_run_burst(o),
        "no layer has the cp_comm_type burst, so all layers would run Megatron's own attention",
        "set it in your own TransformerConfig, pass --cp-comm-type burst, or import "
        "megatron_burst.patch before you call validate_args of megatron.training.arguments, which "
        "sets it"),
    Refusal("spec", "mtp_num_layers", (0,),
        "Megatron builds layers of multi-token prediction without --spec",
        f"start the script with python -m megatron_burst and {FLAG} instead of --spec",
        got="--mtp-num-layers {value}"),
    *_by_spec("burst_keep", OFF, "kept results are found by hooks in torch's and Megatron's "
                                 "checkpoints"),
    *_by_spec("burst_keep_offload", (*OFF, "results"), "layers' inputs are caught by hooks in "
              "Megatron's checkpoints"),
    *_by_spec("dataloader_inter_document_masking", OFF, "Megatron's RoPE assumes that each "
              "document is sharded on its own"),
    *_by_spec("sft", lambda sft, o: not sft or o.has_te, "without TransformerEngine Megatron "
              "does not know which rows of packed samples a rank holds"),
    # burst attention: arguments, configurations and layers
    Refusal("attention", "attention_dropout", (0.0,), "burst's kernels do not support dropout",
        "pass --attention-dropout 0"),
    Refusal("attention", "reset_attention_mask", OFF,
        "Megatron then separates documents with a dense mask, which causal attention ignores",
        "pass --dataloader-inter-document-masking"),
    Refusal("attention", "dataloader_inter_document_masking",
        lambda on, o: not on or o.context_parallel_size == 1 or not needs_documents(o)
        or (shards_documents() and bool(getattr(o, "hybrid_layer_pattern", None))),
        "multi-token prediction, Mamba, GDN and MLA with fused yarn assume that each document "
        "is sharded on its own, but this flag shards the sample as a whole",
        "leave these out (for yarn --no-rope-fusion is enough), or run with one "
        "context-parallel rank"),
    Refusal("attention", "hybrid_context_parallel", OFF,
        # HybridCPDataLoaderWrapper.unpack_batch (core/datasets/data_schedule.py:261), and then
        # get_batch_on_this_cp_rank (core/utils.py:2652); 0.16 and 0.17 shard another way
        "from 0.18 on Megatron's loader drops the boundaries of its samples, so each sample is "
        "sharded over the layer's group instead of its own (older releases are untested)",
        "leave it out (BalancedBatches with cp_sizes gives micro-batches groups of their own, or "
        "shard samples in your script and pass packed_seq_params.cp_group)"),
    Refusal("attention", "attention_cp_layout",
        lambda layout, o: layout in (None, "zigzag") or o.context_parallel_size == 1,
        "Megatron applies RoPE with the positions of zigzag chunks",
        "leave it at zigzag (--linear-cp-layout may be contiguous: Megatron converts rows "
        "before and after attention layers)"),
    Refusal("attention recompute loss", "recompute_modules",
        lambda modules, o: "mlp" not in (modules or ()) or not (
            _selective(o) and o.add_bias_linear),
        "Megatron's checkpoint of an MLP returns the bias, and the bias's backward enters the "
        "checkpoint again, without end",
        "pass --disable-bias-linear, or leave mlp out", got="--recompute-modules {words}"),
    Refusal("attention", "use_kitchen_attention", OFF, "it replaces core attention too"),
    Refusal("attention", "flash_attention_version",
        lambda version, o: version is None or (version == 4 and _invariant(o)),
        "it names a kernel of Megatron's own attention (4 under --burst-invariant is burst's too)",
        "leave it out, or pass --burst-backend"),
    Refusal("attention", "experimental_attention_variant", DELTA_NETS,
        "burst computes softmax attention over all keys that a mask shows, neither over keys that "
        "learned scores select (DSA) nor linear attention (KDA)", _WITHOUT),
    Refusal("attention", "batch_invariant_mode", lambda on, o: not on or _invariant(o),
        "burst chooses its mode by lengths and ranks, and the results' bits depend on the mode",
        "leave it out, or pass --burst-invariant too"),
    # what Megatron itself asserts of one context-parallel rank (core/transformer/
    # transformer_config.py:2875), and burst of several
    Refusal("invariant", "attention_backend", ("flash",), "rollouts run FlashAttention",
        "pass --attention-backend flash", option="batch-invariant kernels and other attention"),
    Refusal("invariant", "flash_attention_version",
        lambda version, o: version == 4 or not getattr(o, "batch_invariant_mode", False),
        "training and rollouts must run one kernel with fixed splits, and burst has no "
        "FlashAttention but 4 (3 was never measured)",
        "pass --flash-attention-version 4, also to the rollouts",
        option="batch-invariant kernels and any other FlashAttention"),
    Refusal("attention", "transformer_impl", ("local", "transformer_engine"),
        "only local and transformer_engine have layers to train with",
        "pass --transformer-impl transformer_engine"),
    *(Refusal("attention keep", name, OFF, "burst has no fp8 kernels and does not keep fp8 scales",
              "switch it off", option="fp8 attention")
      for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")),
    Refusal("attention", "attention_type", ("self",), "Megatron does not shard a second sequence",
        _WITHOUT, option="attention other than self-attention"),
    Refusal("attention", "attn_mask_type", _MASKS, _OTHER_MASKS, _WITHOUT, option="this mask"),
    Refusal("backend", "attention_backend", ("auto", "flash", "fused", "unfused"),
        "it is Megatron's own attention, which burst replaces",
        "leave it out, or pass unfused for attention in plain PyTorch"),
    # a call of burst attention
    Refusal("call", "attention_mask", (),
        "causal attention needs no mask tensor, and other masks are not supported", _NO_MASK,
        option="a mask tensor", got="one of shape {value}"),
    Refusal("call", "attention_bias", (), "burst's kernels add no bias",
        "use a position embedding such as rope", option="an attention bias",
        got="one of shape {value}"),
    Refusal("call", "packed_seq_params", ("thd",), "documents are separated in the format thd only",
        "pass packed_seq_params with qkv_format thd", option="these packed sequences",
        got="qkv_format={value}"),
    Refusal("call", "attn_mask_type",
        lambda mask, o: mask in (_MASKS if getattr(o, "packed_seq_params", None) == "thd"
                                 else _MASKS[:2]),
        f"{_OTHER_MASKS}, and padding is supported in packed samples only",
        "use a causal mask without padding, or pass packed_seq_params", option="this mask"),
    Refusal("packed", "cu_seqlens_q", (), "cu_seqlens_q says where documents begin",
        "pass packed_seq_params with cu_seqlens_q", option="packed sequences without boundaries"),
    Refusal("packed", "cu_seqlens_kv", (), "queries and keys must come from the same tokens",
        "pass cu_seqlens_q as cu_seqlens_kv too, and likewise for the padded "
        "boundaries", _OTHER_KEYS),
    Refusal("packed", "cp_partition_mode",
        lambda mode, o: mode in (None, "zigzag") or o.cp_group_size == 1,
        "each document is assumed to be sharded on its own, in zigzag order", "leave it out"),
    Refusal("packed", "local_cp_size", lambda size, o: size in (None, o.cp_group_size),
        "local_cp_size must be the size of the micro-batch's cp_group, or 1 without one",
        "pass both", option="this group",
        got="local_cp_size={value} and a cp_group of {o.cp_group_size}"),
    Refusal("packed", "keep", lambda keep, o: keep != "auto",
        "all ranks of a group must keep the same, and only the ranks of the layer's own group have "
        "agreed on a choice", f"pass {KEEP_FLAG} all", option="keep=auto",
        got="keep={value} and a group of the micro-batch's own ({o.cp_group_size} ranks)"),
    Refusal("packed", "mtp_num_layers", (0,),
        "Megatron shifts the tokens of multi-token prediction over the model's own group",
        "leave one of them out", option="multi-token prediction",
        got="mtp_num_layers={value} and a group of the micro-batch's own ({o.cp_group_size} "
        "ranks)"),
    Refusal("cache", "key_tokens", lambda tokens, o: tokens == o.query_tokens and not o.engine,
        "KV caches are not supported: queries and keys must come from the same tokens, in "
        "training or evaluation", "generate with a model built with --context-parallel-size 1",
        option="keys of a cache", got="{o.query_tokens} query and {value} key tokens in {o.place}"),
    # keeping, and offloaded inputs
    Refusal("recompute", "recompute_granularity",
        lambda value, o: value is not None or getattr(o, "recompute_activations", False),
        "results are kept for recomputation only",
        "pass --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        option="all activations saved", got="no --recompute-granularity"),
    Refusal("keep", "recompute_modules",
        lambda modules, o: not modules or "core_attn" in modules or not _selective(o),
        "results can only be kept if attention is recomputed",
        f"add core_attn, or leave {KEEP_FLAG} out", got="--recompute-modules {words}"),
    Refusal("keep", "attention_dropout", (0.0,),
        "a recomputation that skips attention would not draw its random numbers",
        "pass --attention-dropout 0"),
    Refusal("keep", "experimental_attention_variant", DELTA_NETS,
        "only softmax attention over all keys can be kept", f"leave {KEEP_FLAG} out"),
    Refusal("keep", "use_kitchen_attention", OFF,
        "only burst's attention, TransformerEngine's and Megatron's own can be kept",
        f"leave {KEEP_FLAG} out"),
    Refusal("half", "context_parallel_impl",
        lambda impl, o: impl == "burst" or "burst" in (o.cp_comm_type or ()),
        "only burst's attention can reshard rows", f"pass {KEEP_FLAG} all, or {FLAG}",
        got="--context-parallel-impl {value}"),
    Refusal("half", "cp_comm_type",
        lambda kinds, o: "burst" not in (kinds or ()) or {*kinds} == {"burst"}
        or o.burst_keep_layers is not None,
        "only burst's attention can reshard rows", f"pass {KEEP_FLAG} all, or {FLAG}",
        got="--cp-comm-type {words}"),
    Refusal("modules", "recompute_granularity", ("full",),
        "modules are kept in checkpoints of whole layers",
        "pass --recompute-granularity full, or leave keep_modules out"),
    *(Refusal("modules", f"fp{bits}", OFF,
        "quantized modules pair a first pass with its recomputation themselves",
        "leave keep_modules out", option=f"--fp{bits}-format") for bits in (8, 4)),
    *(Refusal("modules", name, OFF, "a module in a CUDA graph is not called in a checkpoint",
        "leave one of them out") for name in CUDA_GRAPHS),
    Refusal("modules", "moe_enable_routing_replay",
        lambda on, o: not on or "router" not in getattr(o, "burst_keep_modules", ()),
        "a router that repeats recorded decisions takes the next one in each recomputation",
        "leave router out of keep_modules"),
    Refusal("modules", "burst_keep_modules",
        lambda names, o: KEEP_MODULES.issuperset(names or ())
        and (not _keeps_dispatch(o) or "router" in names),
        "only some modules can be kept, and token_dispatch, which waits for the number of tokens, "
        "only with the router", f"name {', '.join(sorted(KEEP_MODULES))}", option="keep_modules",
        got="{value}"),
    Refusal("modules", "moe_token_dispatcher_type",
        lambda kind, o: kind in (None, "alltoall") or not _keeps_dispatch(o),
        "other dispatchers hold on to what the previous call sent", _NO_DISPATCH),
    Refusal("modules", "moe_shared_expert_overlap", lambda on, o: not (on and _keeps_dispatch(o)),
        "the shared expert runs inside the call of the all-to-all", _NO_DISPATCH),
    Refusal("modules", "expert_model_parallel_size",
        lambda ranks, o: ranks != 1 or not _keeps_dispatch(o), "a single rank sends no tokens",
        _NO_DISPATCH),
    Refusal("own", "keep", ("none", "all"), "only burst's attention can reshard rows",
        f"pass {KEEP_FLAG} all, or {FLAG}", option="half of the rows",
        got="Megatron's own attention in layer {o.layer_number}"),
    # the fused loss
    Refusal("head", "burst_loss_grads",
        lambda grads, o: grads != "forward" or not getattr(o, "fp16", False),
        "fp16 gradients are not scaled before backward, so small ones would vanish",
        "leave that out", got="grads={value} with --fp16"),
    Refusal("loss head", "fp16_lm_cross_entropy", OFF, "the loss is in float32"),
    Refusal("loss head", "defer_embedding_wgrad_compute", OFF,
        "the weight's gradient comes with the loss"),
    Refusal("loss", "overlap_moe_expert_parallel_comm", OFF,
        "its schedule computes the loss outside the model's forward"),
    Refusal("loss", "linear_cp_layout",
        lambda layout, o: layout in (None, "zigzag") or o.context_parallel_size == 1
        or not getattr(o, "mtp_num_layers", None),
        "heads of multi-token prediction have their rows in zigzag, and the main loss has not",
        f"leave that out, or {LOSS_FLAG}"),
    Refusal("loss", "logits_load_dir", OFF, "distillation needs the logits"),
    Refusal("loss", "modelopt_enabled", OFF, "it replaces the output layer"),
    Refusal(
        "head", "output_layer", (), "only Megatron's ColumnParallelLinear computes these logits",
        f"leave {LOSS_FLAG} out", option="this output layer", got="{value}"),
    Refusal("head", "bias", OFF, "the loss adds no bias", option="a bias of the output layer"),
    Refusal("head", "parallel_output", (True,), "there are no logits to gather", "leave that out",
        option="logits that are gathered"),
    Refusal("head", "gtp_remat_size", (1,), "the output layer's weight is read without "
                                            "gathering it",
        "leave that out", option="a weight that is sharded over other ranks"),
    Refusal("head", "disable_grad_reduce", OFF,
        "the fused loss itself reduces the hidden states' gradients", option="disable_grad_reduce"),
    # CPU mode
    _on_gpus("fp8", "8-bit kernels", option="--fp8-format"),
    _on_gpus("fp4", "4-bit kernels", option="--fp4-format"),
    _on_gpus("tp_comm_overlap", "TransformerEngine's layers"),
    _on_gpus("moe_token_dispatcher_type", "all-to-alls by DeepEP or HybridEP",
             ("allgather", "alltoall")),
    _on_gpus("optimizer_cpu_offload", "memory of their own"),
    _on_gpus("batch_invariant_mode", "batch-invariant kernels"),
    *(_on_gpus(name, "CUDA's statistics of memory") for name in
      ("log_memory_to_tensorboard", "log_device_memory_used", "record_memory_history")),
    Refusal("cpu", "profile", lambda on, o: not on or o.use_pytorch_profiler,
        "only GPUs have CUDA's profiler", "pass --use-pytorch-profiler too"),
    *_cuda_graphs(),
)  # fmt: skip
