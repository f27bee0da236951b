"""Layers that a family names in place of Megatron's own, and the specs that build them."""
