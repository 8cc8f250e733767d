"""CSV rows as a run would write them, with times chosen by hand."""

from benchmarks.sheets import Row

COMMON = {
    "date": "2026-01-02T03:04:05+00:00",
    "versions": "torch 2.11.0",
    "gpu": "NVIDIA H200",
    "nodes": 1,
    "ranks": 4,
    "link": "",
    "batch": 1,
    "head_dim_qk": 128,
    "head_dim_v": 128,
    "mask": "causal",
    "dtype": "bfloat16",
}


def row(impl, times=None, *, seq=65536, heads=(32, 8), pass_="fwd_bwd", gib=None, **others):
    """A row of "impl:mode" with (ms, ms_min, ms_max); without times, a failed one."""
    name, mode = impl.split(":")
    values = COMMON | {"seq": seq, "heads_q": heads[0], "heads_kv": heads[1], "pass_": pass_}
    if times is None:
        values |= {"status": "failed", "note": "too few heads"}
    else:
        values |= dict(zip(("ms", "ms_min", "ms_max"), times, strict=True))
        values |= {"tflops_per_gpu": 7200 / times[0], "peak_gib": gib}
    return Row(**values | {"impl": name, "mode": mode} | others)


def one_problem(seq=65536, **others):
    """burst 10 ms, the fastest TransformerEngine mode 15 ms, the ceiling 8 ms, one failed."""
    return [
        row("burst:auto", (10.0, 9.0, 12.0), seq=seq, gib=1.5, **others),
        row("burst:ring", (9.0, 9.0, 9.0), seq=seq, gib=1.0, **others),
        row("te:p2p", (20.0, 20.0, 20.0), seq=seq, gib=2.0, **others),
        row("te:all_gather", (15.0, 14.0, 16.0), seq=seq, gib=2.5, **others),
        row("te:a2a", seq=seq, **others),
        row("ceiling:auto", (8.0, 7.9, 8.1), seq=seq, **others),
    ]
