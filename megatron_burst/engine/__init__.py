"""Runs programs: `passes` (both passes of a call as autograd sees them), `executor` (the loop),
`run` (a program and its tensors), `operations` (a function for each operation).
"""
