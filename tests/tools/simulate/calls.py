"""Calls to simulate, from the words of options."""

from megatron_burst.schedule.layout import Layout
from megatron_burst.schedule.mask import Mask
from megatron_burst.schedule.spec import AttentionShape, Circulate, Kernel
from megatron_burst.schedule.topology import Topology
from megatron_burst.tools.simulate.call import AttentionCall, resolved, run_by


def opened(
    shape: AttentionShape, topology: Topology, *, intra="auto", inter="auto", circulate="auto",
    transfer="auto", resend="auto", grad_wire="auto", pieces=True, heads_per_round=None,
    resends=False, layout=Layout.ZIGZAG, mask=Mask.CAUSAL, device="cuda", multiprocessors=132,
    backend="auto", neighbours=1, overlap=True,
) -> AttentionCall:  # fmt: skip
    """A call with the choices open that are "auto"."""

    def given(word):
        return None if word == "auto" else word

    call = AttentionCall(
        topology, shape, layout, mask, Kernel(device=device, multiprocessors=multiprocessors),
        resends, given(inter), given(intra), heads_per_round=heads_per_round if pieces else 0,
        grad_wire=given(grad_wire), circulate=given(circulate) and Circulate(circulate),
        pulled={"pull": True, "send": False}.get(transfer), neighbours=neighbours, overlap=overlap,
        saves_remote={"never": True, "always": False}.get(resend),
    )  # fmt: skip
    return run_by(call, backend)


def call_of(shape: AttentionShape, topology: Topology, **options) -> AttentionCall:
    """A call as burst runs it."""
    return resolved(opened(shape, topology, **options))
