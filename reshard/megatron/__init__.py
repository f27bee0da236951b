"""Megatron-Core: layouts and ranks, parameters, checkpoint keys, arguments; and live models."""
