"""Real Megatron, FSDP, vLLM and SGLang on a CPU: the programs that tests run in processes of their own."""
