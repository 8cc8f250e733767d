"""Process groups, transfers between ranks, and agreement of ranks on what they run.

Programs decide what is sent. `announce`, `cp_groups`, `grid`, `pulled` and `symmetric` are not on
the reading path.
"""
