"""Checkpoints of every kind for the fuzzer to spoil, and what is known of them."""

import contextlib
import io
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from reshard.cli.main import cli
from tests.tools.checkpoints import make
from tests.tools.oracle import dequantized, hf_tensors, megatron_tensors, stored_tensors

FAMILIES = ("qwen3-moe", "llama-rope-tied", "deepseek-v3")
# How what is written back is quantized.
QUANTIZED = {"deepseek-v3": "fp8", "qwen3-moe": "fp8_per_channel"}


@dataclass
class Subject:
    """A checkpoint to spoil: `written` by reshard (with a manifest) or not; `truth` is what it
    holds, `listing` what inspect says, `earlier` what a chain's earlier versions hold."""

    name: str
    path: Path
    kind: str
    written: bool
    partner: Path
    truth: dict[str, torch.Tensor]
    megatron: dict[str, torch.Tensor]
    listing: dict[str, Any] = field(default_factory=dict)
    earlier: list[dict[str, torch.Tensor]] = field(default_factory=list)


def subjects(folder: Path, families: tuple[str, ...] = FAMILIES) -> list[Subject]:
    """Small checkpoints of each family: as published, as reshard writes them in both formats, and
    as training saves them."""
    found = []
    for family in families:
        base = folder / family
        published, mcore, saved, back = base / "published", base / "mcore", base / "saved", base / "back"
        make(published, family, dtype=torch.bfloat16, **({"mtp": True} if family == "deepseek-v3" else {}))
        (published / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
        (published / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
        if family == "qwen3-moe":
            _shard(published)
        truth = hf_tensors(published)
        hf_to_mcore(published, mcore, MegatronLayout(tp=2), sync=False)
        way = QUANTIZED.get(family, False)
        mcore_to_hf(mcore, back, max_shard_size="200KB", sync=False, quantize=way)
        _save_by_torch(mcore, saved)
        megatron = stored_tensors(mcore / "release")
        requantized = dequantized(back)
        quantized_megatron = megatron_tensors(
            back, len(megatron["embedding.word_embeddings.weight"]), requantized
        )
        partner = mcore
        if way:
            partner = base / "mcore-of-back"
            hf_to_mcore(back, partner, MegatronLayout(tp=2), sync=False)
        found += [
            Subject(f"{family} published", published, "hf", False, mcore, truth, megatron),
            Subject(f"{family} back", back, "hf", True, partner, requantized, quantized_megatron),
            Subject(f"{family} mcore", mcore, "mcore", True, published, truth, megatron),
            Subject(f"{family} saved", saved, "mcore", False, published, truth, megatron),
        ]
    for subject in found:
        subject.listing = json.loads(run_command(["inspect", str(subject.path), "--tensors", "--json"])[1])[
            "tensors"
        ]
    return found


def _shard(directory: Path) -> None:
    """Three files and an index in place of one file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        part = {n: tensors[n] for n in names[i::3]}
        save_file(part, directory / f"model-{i + 1:05d}-of-00003.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, f"model-{i + 1:05d}-of-00003.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def _save_by_torch(mcore: Path, directory: Path) -> None:
    """The same tensors as torch saves them, with the args and nothing of reshard's beside them."""
    import torch.distributed.checkpoint as dcp

    release = directory / "release"
    dcp.save(
        stored_tensors(mcore / "release"), storage_writer=dcp.FileSystemWriter(str(release)), no_dist=True
    )
    torch.save(torch.load(mcore / "release" / "common.pt", weights_only=False), release / "common.pt")
    for name in ("release/metadata.json", "latest_checkpointed_iteration.txt"):
        shutil.copy(mcore / name, directory / name)


def run_command(arguments: list[str]) -> tuple[int, str]:
    """The exit status and the output of a command line, run here."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        status = cli(arguments, prog_name="reshard", standalone_mode=False)
    return (status if isinstance(status, int) else 0), out.getvalue()
