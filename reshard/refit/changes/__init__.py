"""What changed since the last refit: whether that alone is sent, and the kernels that find and write it."""
