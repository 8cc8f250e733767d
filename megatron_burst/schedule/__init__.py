"""What a rank does in one pass of attention, as data: programs, and the modes that emit them.

Pure Python, no torch. `program` defines the operations, `order` derives waits and which buffers
share memory, `ring`, `gather` and `a2a` each emit a program, `check` proves programs correct.
"""
