"""What of a call is refused; a need: whether it holds, what must and why, got, what to change."""

from collections.abc import Iterator
from itertools import chain

import torch

from megatron_burst.arguments import need_of_argument
from megatron_burst.call import Call
from megatron_burst.errors import Need, require
from megatron_burst.schedule.layout import Layout, check_tokens

_WHO = "burst attention"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _of_names(call: Call) -> Iterator[Need]:
    yield from (
        (call.qkv_format in ("bshd", "sbhd", "thd"),
         "qkv_format must be bshd, sbhd or thd, because it names the order of the axes",
         repr(call.qkv_format), "pass one of these"),
        (call.layout in tuple(Layout),
         f"layout must be one of {', '.join(Layout)}, because it decides which keys a query may "
         "attend to", repr(call.layout), "pass the layout in which the tokens are sharded"),
        (call.packed or call.layout != Layout.DOCUMENTS,
         "cu_seqlens must be given for the layout zigzag-documents, because it shards each "
         "document on its own", "no cu_seqlens", "pass it, or another layout"),
    )  # fmt: skip


def _of_sample(call: Call) -> Iterator[Need]:
    tree, slices = "prefix_tree" in call.sample_args, "slices" in call.sample_args
    alternatives = ", ".join(name for name in call.sample_args if name != "slices")
    yield from (
        (call.packed or not alternatives,
         f"cu_seqlens must come with {alternatives}, because it says where documents begin and end",
         "no cu_seqlens", f"pass it, or leave out {alternatives}"),
        (not tree or call.window == (None, 0),
         "a prefix tree must be causal and without a window, because a query attends to all "
         "ancestors of its segment", f"causal={call.causal} and window={call.window}",
         "leave out causal and window, or prefix_tree"),
        (not slices or (call.window in ((None, 0), (None, None)) and not tree),
         "slices must come without a window or a prefix tree, because slices alone say what a "
         "query sees", f"window={call.window}" + ", prefix_tree" * tree,
         "leave these out, and add slices for them"),
        (not slices or call.layout != Layout.STRIPED,
         "with slices the sample must be sharded in chunks, because kernels need to know where a "
         "rank's rows are", "layout striped", "shard it in zigzag or contiguous"),
        (not slices or not call.packed or call.layout == Layout.DOCUMENTS,
         "slices must come without cu_seqlens, except in the layout zigzag-documents, because "
         "slices alone say what a query sees", "both",
         "leave cu_seqlens out, and add slices for the documents"),
        (not tree or call.layout != Layout.DOCUMENTS,
         "a prefix tree must be sharded as one sample, because segments attend to each other",
         f"layout {call.layout}", "shard the sample in zigzag or contiguous, without padding"),
    )  # fmt: skip


def _of_shapes(call: Call) -> Iterator[Need]:
    q, k, v = call.shapes
    packed = call.qkv_format == "thd"  # with a batch axis of 1 added
    got = ", ".join(f"{n} {tuple(x)[packed:]}" for n, x in zip("qkv", call.shapes, strict=True))
    yield (
        all(len(shape) == 4 for shape in (q, k, v)),
        f"q, k and v must have {'three' if packed else 'four'} axes ({call.qkv_format}), "
        "because heads have an axis of their own", got, "reshape them",
    )  # fmt: skip
    batch = call.qkv_format == "sbhd"  # the number of its axis
    yield from (
        (not call.packed or q[batch] == 1,
         "packed documents must have batch size 1, because cu_seqlens describes a single sample",
         got, "pass a batch of one"),
        (q[batch] == k[batch] and k[:3] == v[:3] and q[3] == k[3],
         "q, k and v must have one batch size, k and v equal heads and tokens, q and k one head "
         "dimension, because each key is compared with queries and has a "
         "value", got, "pass matching shards"),
        (batch or call.mask.full or not q[2] == k[2] > q[1] > k[1],
         "q, k and v must be [b, s, h, d], because the sequence is the second axis", got,
         "pass x.transpose(1, 2) of [b, h, s, d], as for scaled_dot_product_attention"),
        (q[1 - batch] == k[1 - batch] or (call.mask.full and not call.packed),
         "q and k must have equally many tokens if the mask is causal, a window or documents, "
         "because these masks compare positions in one sequence", got,
         "for cross-attention pass causal=False without a window or cu_seqlens, or pass slices"),
        (0 not in (*q, *k, *v) and q[2] % k[2] == 0,
         "the number of KV heads must divide the number of query heads, and no axis may be empty, "
         "because each KV head serves equally many query heads", got,
         "change the heads (in Megatron --num-query-groups) or the batch"),
    )  # fmt: skip


def _of_tensors(call: Call) -> Iterator[Need]:
    device = call.devices[0]
    yield from (
        (call.dtypes[0] in _DTYPES and len(set(call.dtypes)) == 1,
         "q, k and v must have one dtype among float64, float32, bfloat16 and float16, because "
         "nothing is converted silently", ", ".join(map(str, call.dtypes)), "cast them"),
        (len(set(call.devices)) == 1,
         "q, k and v must be on one device, because one kernel reads them",
         ", ".join(map(str, call.devices)), "move them"),
        (not call.is_elsewhere(device),
         "q, k and v must be on the process's current device, because streams and transfers use "
         "that device", f"{device} while cuda:{call.current_device} is current",
         "call torch.cuda.set_device(LOCAL_RANK) first"),
    )  # fmt: skip


def _of_sink(call: Call) -> Iterator[Need]:
    if not call.sink:
        return
    (shape, dtype, device, _), heads = call.sink, call.shapes[0][2]
    yield from (
        (shape == (heads,),
         "sink must have one score for each query head, because it joins the softmax of each head",
         f"shape {shape} and {heads} query heads", "pass this rank's heads"),
        (dtype in (torch.float32, call.dtypes[0]),
         "sink must be in float32 or in q's dtype, because kernels read it as it is", dtype,
         "cast it"),
        (device == call.devices[0],
         "sink must be on the device of q, k and v, because one kernel reads them", device,
         "move it"),
    )  # fmt: skip


def _of_options(call: Call) -> Iterator[Need]:
    yield (
        torch.finfo(torch.float32).tiny <= call.softmax_scale < float("inf"),
        "softmax_scale must be positive and finite, because kernels take the largest score "
        "before they scale it", call.softmax_scale, "leave it out to scale by d ** -0.5",
    )  # fmt: skip
    config = call.config
    per_layer = config.keep == "auto", config.keep_layers is not None, config.offloads_inputs
    for name, is_given in zip(("keep", "keep_layers", "keep_offload"), per_layer, strict=True):
        yield (
            not is_given,
            f"{name} must be resolved by Megatron's layers, because a single call does not know "
            "the other layers", f"{name}={getattr(config, name)}",
            "pass keep none, half or all to each call, and leave the rest out",
        )  # fmt: skip


_NEEDS = _of_names, _of_sample, _of_shapes, _of_tensors, _of_sink, _of_options


def check(call: Call, cp_size: int) -> None:
    """Refuse an invalid call; by now it is the same on all ranks.

    Raises:
        BurstError: in one sentence.
    """
    require(_WHO, (need_of_argument(name, got) for name, got in call.wrong_kinds))
    require(_WHO, chain.from_iterable(needs(call) for needs in _NEEDS))
    for tokens in (call.shape.tokens, call.shape.keys):
        check_tokens(call.token_layout, cp_size, tokens)
