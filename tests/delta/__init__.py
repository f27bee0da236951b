"""Tests of chains of deltas."""
