"""The weights of a live vLLM rank: which canonical boxes it holds, where they lie, and what a refit does to each tensor."""
