"""The file formats: safetensors, and the zip and pickle inside Megatron's torch_dist."""
