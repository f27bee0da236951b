"""A PEFT directory as vLLM's own loader of adapters reads it, without an engine."""

import hashlib
import json
from pathlib import Path


def loaded(directory: str, modules: list[str]) -> dict:
    """The scale, and digests of A and B, of every layer that vLLM finds an adapter for among layers that end with
    one of these names; any other layer is an error of vLLM's."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(directory, 256)
    adapter = LoRAModel.from_local_checkpoint(directory, set(modules), helper, lora_model_id=1, device="cpu")
    return {
        name: [pair.scaling, digest(pair.lora_a), digest(pair.lora_b)] for name, pair in adapter.loras.items()
    }


def digest(tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def read(directory: str) -> dict:
    """The same by PEFT's names, with safetensors' own reader."""
    from safetensors.torch import load_file

    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    config = json.loads((Path(directory) / "adapter_config.json").read_text())
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): [
            config["lora_alpha"] / config["r"], digest(a), digest(tensors[name.replace("lora_A", "lora_B")])
        ]
        for name, a in tensors.items() if ".lora_A." in name
    }  # fmt: skip
