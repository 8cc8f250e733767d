"""Training jobs as data: a model, ways to shard it, their memory and time, the search over them."""
