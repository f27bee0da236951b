"""Tests of the memory of live tensors."""
