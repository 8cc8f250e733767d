"""Attention of one tile on one device: backends, their choice, merging of results.

Nothing here knows of ranks, rings or schedules.
"""
