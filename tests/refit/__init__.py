"""Tests of connect and refit."""
