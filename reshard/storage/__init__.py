"""Checkpoints on disk: stores, one run and its faults, conversion, comparison, inspection."""

from reshard.core.extras import require_base

require_base()
