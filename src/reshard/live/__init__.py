"""Live models as placements: what a trainer's Megatron model and a running vLLM hold, and where in memory it
lies."""
