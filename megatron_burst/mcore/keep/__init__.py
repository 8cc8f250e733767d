"""Results kept for recomputation in Megatron's layers.

`recompute` attaches `megatron_burst.recompute` to Megatron's checkpoints. `kept_modules` keeps
outputs of modules of a layer, `whole_layers` inputs of none; `stage` chooses what a pipeline stage
keeps in its first step, from its layers (`stage_layers`) and what their modules cost
(`module_costs`).
"""
