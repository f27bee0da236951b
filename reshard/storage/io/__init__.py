"""Rows and boxes of tensors, read from files and written to them."""
