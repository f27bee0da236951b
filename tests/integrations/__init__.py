"""Tests of other people's trainers."""
