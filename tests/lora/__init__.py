"""Tests of LoRA adapters in files."""
