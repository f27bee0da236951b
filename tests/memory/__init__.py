"""Tests of estimates of memory."""
