"""Tests of conversions, and of disks, files and processes that fail."""
