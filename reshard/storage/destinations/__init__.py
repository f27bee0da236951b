"""What is written: a Hugging Face directory or a Megatron checkpoint, laid out before the first
byte."""
