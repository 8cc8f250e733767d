"""Builds dynamo's table of torch's functions, 0.1 s of a core, in the process that ranks are forked
from. Each of them would build it with its first torch.compile, which CPU mode calls."""

from torch._dynamo import trace_rules

trace_rules.get_torch_obj_rule_map()
# init_process_group calls it, for tables that were built while torch.distributed was being imported
trace_rules.clear_lru_cache = lambda: None
