"""What a rank does in one pass of attention, as data: programs, and the modes that emit them.

Pure Python, no torch. `program` has the operations, `order` derives who waits for whom and which
buffers share memory, `ring`, `gather` and `a2a` emit a program each, `check` proves programs right.
"""
