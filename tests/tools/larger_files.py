"""Checkpoints of a larger model that a trainer with Megatron's layers in its tower saves (Megatron-Bridge), written by
torch: the language model behind a prefix, and the tower as Megatron has it, assembled by hand."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.tools.oracle import hf_tensors

# Of published names of a tower's tensors, and Megatron's with local layers.
_NAMES = (
    ("blocks.", "decoder.layers."), ("deepstack_merger_list.", "decoder.deepstack_merger_list."),
    (".attn.qkv.", ".self_attention.linear_qkv."), (".attn.proj.", ".self_attention.linear_proj."),
    (".norm1.", ".input_layernorm."), (".norm2.", ".pre_mlp_layernorm."), (".norm.", ".patch_norm."),
)  # fmt: skip
_STACKED = ("decoder.layers.", "decoder.deepstack_merger_list.")


def keys_of(mcore: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of a language model, by key."""
    directory = mcore / "release"
    metadata = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    tensors = {
        k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "size")
    }
    dcp.load(tensors, checkpoint_id=str(directory), no_dist=True)
    return tensors


def keys_of_larger(hf: Path, mcore: Path) -> dict[str, torch.Tensor]:
    """The tensors of the larger model of a directory, whose language model `mcore` has, by key."""
    heads = json.loads((hf / "config.json").read_text())["vision_config"]["num_heads"]
    stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in hf_tensors(hf).items():
        if not name.startswith("model.visual."):
            continue
        key = name.removeprefix("model.visual.")
        for published, own in _NAMES:
            key = key.replace(published, own)
        if ".linear_qkv." in key:  # each head has its query, its key and its value
            tensor = tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        index = -1
        for prefix in _STACKED:
            if key.startswith(prefix):
                number, _, rest = key.removeprefix(prefix).partition(".")
                key, index = prefix + rest, int(number)
        stacks[f"vision_model.{key}"][index] = tensor.contiguous()
    tower = {
        key: stack[-1] if -1 in stack else torch.stack([stack[i] for i in sorted(stack)])
        for key, stack in stacks.items()
    }
    return {f"language_model.{key}": tensor for key, tensor in keys_of(mcore).items()} | tower


def write(folder: Path, mcore: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with these tensors and the arguments of `mcore`, and none of what reshard puts beside."""
    left = shutil.ignore_patterns("hf", "*.distcp", ".metadata", "reshard*", "megatron_flags.txt")
    shutil.copytree(mcore, folder, ignore=left)
    dcp.save(tensors, checkpoint_id=str(folder / "release"), no_dist=True)
    return folder
