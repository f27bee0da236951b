"""Tests of quantization schemes and checkpoints in them."""
