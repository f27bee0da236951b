"""The weights of a live vLLM rank: which canonical boxes it holds, where they lie, and what a refit does
to each tensor.

`served` looks at model and drafter as one; `supported` refuses what cannot be written; `rank` says which
rank this is, `stand_ins` traces where vLLM loads the published tensors; `drafter`,
`block_scales` and `mla` are for tensors of their kind; `accounts` for what is left; `kept` for what vLLM
loses in sleep.
"""
