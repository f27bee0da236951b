"""Where the tensors of live models lie in memory."""
