"""Deltas: what changed between two versions of the same weights, and nothing else."""
