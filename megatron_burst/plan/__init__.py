"""Everything that can be decided before a tensor exists: pure Python, no torch.

Topology, token layouts, masks, schedules, their bytes, FLOPs, time and memory on given hardware
(`machines/`), whole training steps, the search over ways to shard a job, and plots.
Nothing here moves data; `megatron_burst.engine` executes what is planned here.
"""
