"""The connection of a LoRA adapter above that of its base."""
