"""Frameworks that build on Megatron, each with the hook that loads burst into it.

`make test-integrations` makes an environment for each and runs its test file there; a file skips if
its framework is not installed. For a framework that cannot be installed, its own source file at a
pinned version is read from a clone, and the test says so.
"""
