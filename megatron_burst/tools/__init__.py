"""What runs beside training, not in it: the planner and its simulator, pictures, doctor, calibrate,
and Megatron on CPU processes for trying out.

`megatron-burst`, or `python -m megatron_burst.tools`, is the command. It imports the trainer; the
trainer imports nothing from here, except that its entry points reach CPU mode where there is no
GPU.
"""
