"""Mapping tables: one file of literals per family. `reshard/tables.py` explains the columns."""
