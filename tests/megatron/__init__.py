"""Tests of Megatron's side: layouts, arguments, models, checkpoints, optimizer states."""
