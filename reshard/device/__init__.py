"""Memory of live models: regions of tensors, and the CUDA driver's view of them."""
