"""What a rank does in one pass of attention, as data: programs, and the modes that emit them.

Pure Python, no torch. `spec` says what determines a program, `program` what it is made of. `ring`,
`gather` and `a2a` each emit programs. `order` derives waits and which buffers share memory. The
proofs of programs are in tests/proof/.
"""
