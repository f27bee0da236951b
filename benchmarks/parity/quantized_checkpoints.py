"""The checkpoints of `benchmarks.parity.quantized`: the weights of one model, written in each of the formats that
engines load quantized."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

PUBLISHED = "published"
# Checkpoints in the format of compressed-tensors, with that package's own bits.
INT4 = ("published-int4_per_group", "published-int4_per_group_32", "published-int4_per_channel")
FP8 = ("published-fp8_per_channel", "published-fp8_per_tensor", "published-fp8_per_block")
COMPRESSED = (*FP8, "published-int8_per_channel", *INT4, "published-nvfp4")
# Those of them that ``mcore-to-hf --quantize`` writes.
BY_CONVERSION = (FP8[0], *INT4[:2], "published-nvfp4")
WEIGHT_ONLY, W4A4, MODELOPT = "published-fp8_weight_only", "published-nvfp4_w4a4", "modelopt-nvfp4"
ALL_PUBLISHED = (PUBLISHED, *COMPRESSED, WEIGHT_ONLY, W4A4, MODELOPT)


class Places(NamedTuple):
    """Where the checkpoints of one model are."""

    hf: Path
    mcore: Path
    fp8: Path
    converted: Path

    def compressed(self, way: str) -> Path:
        """The checkpoint of a way of `COMPRESSED`, or `MODELOPT`."""
        return self.converted.with_name(way)


def write_published(places: Places, ways: Collection[str]) -> None:
    """Write the model, which lies in `places` for Hugging Face and Megatron, in each of these ways."""
    from reshard import mcore_to_hf

    if PUBLISHED in ways:
        mcore_to_hf(places.mcore, places.converted, quantize=True)
        publish(places)
    for way in set(COMPRESSED).intersection(ways):
        if way in BY_CONVERSION:
            mcore_to_hf(places.mcore, places.compressed(way), quantize=way.removeprefix("published-"))
        else:
            publish_by_compressed_tensors(places, way)
    if WEIGHT_ONLY in ways:
        mcore_to_hf(places.mcore, places.compressed(WEIGHT_ONLY), quantize="fp8_per_channel")
        set_inputs(places.compressed(WEIGHT_ONLY), None)
    if W4A4 in ways:
        mcore_to_hf(places.mcore, places.compressed(W4A4), quantize="nvfp4")
        set_inputs(places.compressed(W4A4), "local")
        add_input_scales(places.compressed(W4A4))
    if MODELOPT in ways:
        publish_by_modelopt(places)


def publish(places: Places) -> None:
    """What was converted, quantized by vLLM's own function, on the GPU where there is one."""
    from safetensors.torch import load_file, save_file

    from benchmarks.processes import device
    from reshard.engines.vllm.quantized.layers import own_blocks

    places.fp8.mkdir()
    shutil.copy(places.converted / "config.json", places.fp8)
    plain = load_file(places.hf / "model.safetensors")
    converted = {name for file in places.converted.glob("*.safetensors") for name in load_file(file)}
    for name in [name for name in plain if f"{name}_scale_inv" in converted]:
        codes, scales = own_blocks(plain[name].to(device()), "fp32")
        plain |= {name: codes.cpu(), f"{name}_scale_inv": scales.cpu()}
    save_file(plain, places.fp8 / "model.safetensors", metadata={"format": "pt"})


def set_inputs(folder: Path, dynamic: str | None) -> None:
    """Let a checkpoint by compressed-tensors say that activations are as they are, or quantized as
    its weights are."""
    config = json.loads((folder / "config.json").read_text())
    [group] = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = None if dynamic is None else group["weights"] | {"dynamic": dynamic}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def add_input_scales(folder: Path) -> None:
    """Write scales of inputs beside a checkpoint in nvfp4, as if they had been measured: all the
    same."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += [name for name in opened.keys() if name.endswith("weight_global_scale")]  # noqa: SIM118
    scales = {name.replace("weight_global", "input_global"): torch.tensor([1000.0]) for name in names}
    save_file(scales, folder / "inputs.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        said = json.loads(index.read_text())
        said["weight_map"] |= dict.fromkeys(scales, "inputs.safetensors")
        index.write_text(json.dumps(said), encoding="utf-8")


def publish_by_modelopt(places: Places) -> None:
    """Write the same weights in nvfp4, by ModelOpt's arithmetic and names, as W4A16."""
    from benchmarks.processes import device
    from reshard.quantization.nvfp4 import fused
    from reshard.quantization.nvfp4_torch import ModelOpt, encode

    plain, quantized = plain_weights(places)
    largest = {name: plain[name].abs().max().view(1) for name in quantized}
    stored = {name: weight for name, weight in plain.items() if name not in largest}
    for name in quantized:
        together = torch.stack([largest[other] for other in fused(name) if other in largest]).max().view(1)
        made = encode(plain[name].to(device()), together.to(device()), ModelOpt())
        stored |= {name + end: one.cpu() for end, one in made.items()}
    how = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*.mlp.gate"],
    }
    write_stored(places, MODELOPT, stored, how)


def publish_by_compressed_tensors(places: Places, way: str) -> None:
    """Write the same weights in a scheme of compressed-tensors that ``mcore-to-hf`` does not write."""
    from benchmarks.processes import device
    from reshard.quantization import channels_torch, compressed_tensors, int_groups_torch
    from reshard.quantization.channels import Channels
    from reshard.quantization.int_groups import IntGroups

    schemes = {
        "int8_per_channel": Channels("int8"),
        "fp8_per_tensor": Channels("float8_e4m3fn", "tensor"),
        "fp8_per_block": Channels("float8_e4m3fn", "block", (128, 128)),
        "int4_per_channel": IntGroups(4),
    }
    scheme = schemes[way.removeprefix("published-")]
    encode = int_groups_torch.encode if isinstance(scheme, IntGroups) else channels_torch.encode
    plain, quantized = plain_weights(places)
    stored = {name: weight for name, weight in plain.items() if name not in quantized}
    for name in quantized:
        made = encode(plain[name].to(device()), scheme)
        stored |= {name + end: one.cpu() for end, one in made.items()}
    kept = [
        name.removesuffix(".weight") for name, one in plain.items() if one.ndim == 2 and name not in quantized
    ]
    how = compressed_tensors.config_of(scheme, kept)
    group = how["config_groups"]["group_0"]
    if scheme.strategy == "tensor":
        group["input_activations"]["strategy"] = "tensor"
    elif scheme.strategy == "block":
        group["weights"]["block_structure"] = [128, 128]
        group["input_activations"] |= {"strategy": "group", "group_size": 128}
    write_stored(places, way, stored, how)


def plain_weights(places: Places) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the tensors of the checkpoint in bf16, and the names of those that are quantized."""
    from safetensors.torch import load_file

    from reshard.models.model import Model

    plain = load_file(places.hf / "model.safetensors")
    model = Model.from_hf(json.loads((places.hf / "config.json").read_text()))
    return plain, model.quantizable() & plain.keys()


def write_stored(places: Places, way: str, stored: dict[str, torch.Tensor], quantization: dict) -> None:
    """Write a checkpoint of these tensors, with this ``quantization_config``."""
    from safetensors.torch import save_file

    folder = places.compressed(way)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((places.hf / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
