"""Megatron-Core: layouts and ranks, parameters, checkpoint keys, arguments, and models built from them."""
