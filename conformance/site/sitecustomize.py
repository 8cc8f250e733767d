"""Python runs this as it starts: so processes that a peer's test starts have burst in place too."""

from conformance.in_place import install

install()
