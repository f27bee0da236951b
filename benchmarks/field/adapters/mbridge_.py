"""mbridge (verl's): a model on the CPU, filled or read by the bridge, and Megatron-Core's own save and load.

python mbridge_.py start | to-megatron HF MEGATRON | to-hf MEGATRON HF SOURCE
"""

import sys
from pathlib import Path


def model_of(source: str, weights: str | None) -> tuple:
    """Return the model of a Hugging Face config, with weights of a directory where one is given, and the bridge."""
    import megatron.core.parallel_state as mpu
    import torch
    from mbridge import AutoBridge

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    bridge = AutoBridge.from_pretrained(source)
    bridge.config.use_cpu_initialization = True
    [model] = bridge.get_model(use_cpu_initialization=True, weight_path=weights)
    return model, bridge


def to_megatron(source: str, target: str) -> None:
    """Convert a Hugging Face directory."""
    from megatron.core import dist_checkpointing

    model, _ = model_of(source, source)
    Path(target).mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), target)


def to_hf(source: str, target: str, original: str) -> None:
    """Convert back, with the config of the original."""
    from megatron.core import dist_checkpointing

    model, bridge = model_of(original, None)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), source))
    bridge.safetensor_io = bridge._get_safetensor_io(original)
    bridge.save_weights([model], target)


if __name__ == "__main__":
    import without_gpu

    if "--as-published" not in sys.argv:
        without_gpu.allow()
    command, *paths = [word for word in sys.argv[1:] if word != "--as-published"]
    if command == "start":
        import mbridge  # noqa: F401
    else:
        {"to-megatron": to_megatron, "to-hf": to_hf}[command](*paths)
