"""``--load-format reshard``: vLLM starts from a Megatron checkpoint."""
