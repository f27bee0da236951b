"""Tests of live models as a home of weights."""
