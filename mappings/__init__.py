"""Mapping tables: one file of literals per family. `reshard.models.tables` explains the columns."""
