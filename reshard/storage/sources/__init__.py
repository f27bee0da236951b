"""What is read: a Hugging Face directory or a Megatron checkpoint, as canonical tensors."""
