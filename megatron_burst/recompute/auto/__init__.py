"""What `keep=auto` keeps: as much as saves most time within the memory that is left.

`first_step` measures a step that keeps nothing, `graph` what autograd holds of a layer. `budget`
divides the memory that is left, by the `search` among modules.
"""
