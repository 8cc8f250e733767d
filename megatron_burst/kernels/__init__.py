"""Attention of one tile on one device: backends, the choice among them, merging of results.

No module here knows ranks or programs.
"""
