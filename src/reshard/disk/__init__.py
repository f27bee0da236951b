"""Checkpoints on disk: stores, one run and its faults, conversion, comparison, inspection."""
