"""LoRA adapters on disk: read, written, and merged into their base model."""
