"""Refit: move the weights of a live Megatron model into a live vLLM, shard to shard and in place."""

from reshard.refit.link import Link, Report, connect
from reshard.refit.members import Members

__all__ = ["Link", "Members", "Report", "connect"]
