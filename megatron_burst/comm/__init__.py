"""Moves tensors between ranks: groups, hop buffers, slots, transfers, out-of-band agreement.

What is sent is decided by the schedule, not here. `announce`, `cp_groups`, `grid`, `pulled` and
`symmetric` are not on the reading path.
"""
