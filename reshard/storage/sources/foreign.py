"""Directories of trainers that reshard does not read: who saved them, and which program converts or merges them."""

from pathlib import Path

from reshard.core.errors import ReshardError

VERL_SHARDS = "model_world_size_*_rank_*.pt"
# A model's shards in DeepSpeed's directory of a step, and all of it without ZeRO.
DEEPSPEED = ("*zero_pp_rank_*_optim_states.pt", "mp_rank_*_model_states.pt")


def check_foreign(path: Path) -> None:
    """Raise ReshardError, with the command that merges them, for the shards of a model that a trainer under FSDP or
    DeepSpeed has left in a directory."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return
    for folder in (path, path / "actor"):
        if any(folder.glob(VERL_SHARDS)):
            raise ReshardError(
                f"{folder} holds the shards of a model that verl has saved under FSDP (model_world_size_*): "
                f"convert them with reshard fsdp-to-hf {folder} DIRECTORY"
            )
    if any(any(path.glob(name)) or any(path.glob(f"global_step*/{name}")) for name in DEEPSPEED):
        top = path.parent if any(any(path.glob(name)) for name in DEEPSPEED) else path
        raise ReshardError(
            f"{path} holds a checkpoint of DeepSpeed (ZeRO): merge it with python {top / 'zero_to_fp32.py'} "
            f"{top} DIRECTORY --safe_serialization"
        )
