"""Tests of geometry, the planner, and the rules that the whole tree keeps."""
