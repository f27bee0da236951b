"""The systems that score prompts: transformers, Megatron-Core, vLLM and SGLang.

base.py         System and ForwardSystem, the interface; scoring from logits
processes.py    the processes of a run, their device and memory
huggingface.py  a Hugging Face directory in transformers
megatron.py     a Megatron checkpoint in Megatron-Core
vllm.py         a vLLM that loads a checkpoint itself, or that already runs
refitted.py     a vLLM that is refitted from Megatron-Core
sglang.py       an SGLang that already runs
outputs.py      scores from vLLM's outputs
opening.py      the system that a path, a hub id or vllm: and one of them names
"""
