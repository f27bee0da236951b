"""Tests of the pages, examples and installation."""
