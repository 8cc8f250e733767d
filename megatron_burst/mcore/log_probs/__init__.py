"""Log-probabilities of frameworks for reinforcement learning, without logits (`log_probs=1`).

`deferred` has logits that are not computed, `head` makes a model return them, and `frameworks` is
the table of the functions of frameworks that compute log-probabilities from them, in
`replacements`.
"""
