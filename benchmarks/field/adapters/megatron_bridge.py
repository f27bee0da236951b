"""Megatron-Bridge's own conversion on a CPU (`scripts/conversion` of its repository: ``--device cpu``).

python megatron_bridge.py start | to-megatron HF MEGATRON | to-hf MEGATRON HF SOURCE
"""

import sys


def to_megatron(source: str, target: str) -> None:
    """Convert a Hugging Face directory: the steps of `AutoBridge.import_ckpt`, without the fusion that needs Apex."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    with temporary_distributed_context("gloo"):
        bridge = AutoBridge.from_hf_pretrained(source, torch_dtype=torch.bfloat16, device_map="cpu")
        provider = bridge.to_megatron_provider()
        provider.gradient_accumulation_fusion = False
        provider.finalize()
        models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        bridge.save_megatron_model(models, target, hf_tokenizer_path=source, low_memory_save=True)


def to_hf(source: str, target: str, original: str) -> None:
    """Convert back, with the config of the original."""
    from megatron.bridge import AutoBridge

    AutoBridge.from_hf_pretrained(original).export_ckpt(source, target, show_progress=False, strict=True)


if __name__ == "__main__":
    import without_gpu

    if "--as-published" not in sys.argv:
        without_gpu.allow()
    command, *paths = [word for word in sys.argv[1:] if word != "--as-published"]
    if command == "start":
        import megatron.bridge.training.model_load_save  # noqa: F401
    else:
        {"to-megatron": to_megatron, "to-hf": to_hf}[command](*paths)
