"""Python runs this as it starts: so processes that a peer's test starts have burst in place too."""

from conformance import in_place, shared_gpus

shared_gpus.install()
in_place.install()
