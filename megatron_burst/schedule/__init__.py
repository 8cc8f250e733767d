"""What a rank does in one pass of attention, as data: programs, and the modes that emit them.

Pure Python, no torch. `spec` says what determines a program, `operations` what it is made of.
`ring`, `gather` and `a2a` each emit a program. `order` derives waits and which buffers share
memory. `check` proves programs correct.
"""
