"""Attention of one tile on one device: backends, how one is chosen, merging of results.

Nothing here knows about ranks, rings or schedules.
"""
