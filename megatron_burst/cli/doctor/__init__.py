"""`megatron-burst doctor`: checks that return records. Nothing here changes anything on a node.

`survey` asks a machine what it has, here or over ssh, by one read-only script; `gpus`, `network`,
`system` and `software` judge that; `job` checks a whole job from inside; `hosts` does so before one
is started; `report` prints.
"""
