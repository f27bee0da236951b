"""Tests of the parity gate."""
