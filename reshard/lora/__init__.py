"""LoRA adapters: their names, shapes and scales, derived from the rows of mapping tables."""
