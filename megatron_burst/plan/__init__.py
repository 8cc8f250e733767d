"""Everything that can be decided before a tensor exists: pure Python, no torch.

Topology, token layouts, masks, ring schedules, their bytes and FLOPs, and drawings of them.
Nothing here moves data; `megatron_burst.engine` executes what is planned here.
"""
