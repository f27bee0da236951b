"""Mapping tables, and a model as its config describes it."""
