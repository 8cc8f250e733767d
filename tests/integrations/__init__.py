"""Frameworks that build on Megatron, each with the hook by which burst gets into it.

`make test-integrations` makes an environment for each and runs its file there; a file skips where
its framework is not installed. Where a framework cannot be installed, its own file at a pinned
version is read from a clone, and the test says so.
"""
