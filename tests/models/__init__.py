"""Tests of configs and families."""
