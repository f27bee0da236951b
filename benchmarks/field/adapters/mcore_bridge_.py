"""mcore-bridge, as ms-swift's `megatron export` uses it: a model on the CPU, filled or read by the bridge, and
Megatron-Core's own save and load.

python mcore_bridge_.py start | to-megatron HF MEGATRON | to-hf MEGATRON HF SOURCE
"""

import sys
from pathlib import Path


def model_of(source: str) -> tuple:
    """Return the model of a Hugging Face config, and the bridge."""
    import megatron.core.parallel_state as mpu
    import torch
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core.transformer.enums import AttnBackend
    from transformers import AutoConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    config = ModelConfig(
        **hf_to_mcore_config(AutoConfig.from_pretrained(source)),
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        attention_backend=AttnBackend.unfused,
        moe_grouped_gemm=True,
    )
    [model] = get_mcore_model(config)
    return model, config.bridge


def to_megatron(source: str, target: str) -> None:
    """Convert a Hugging Face directory."""
    from megatron.core import dist_checkpointing

    model, bridge = model_of(source)
    bridge.load_weights([model], source)
    Path(target).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), target)


def to_hf(source: str, target: str, original: str) -> None:
    """Convert back, with the config of the original."""
    from megatron.core import dist_checkpointing

    model, bridge = model_of(original)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), source))
    bridge.save_weights([model], target)


if __name__ == "__main__":
    import without_gpu

    if "--as-published" not in sys.argv:
        without_gpu.allow()
    command, *paths = [word for word in sys.argv[1:] if word != "--as-published"]
    if command == "start":
        import mcore_bridge.model  # noqa: F401
    else:
        {"to-megatron": to_megatron, "to-hf": to_hf}[command](*paths)
