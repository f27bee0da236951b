"""Copies between addresses of memory: their tables, the kernels and the host that carry them out, and digests of
what they copied."""
