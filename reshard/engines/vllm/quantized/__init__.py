"""Layers that vLLM quantizes: what a refit makes of plain weights for each kind of them."""
