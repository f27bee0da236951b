"""Whether a converter's output has the bits of its source, by readers that share no code with any converter."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from tests.tools.oracle import hf_tensors, megatron_tensors, stored_tensors


def different_hf(source: Path, output: Path) -> list[str]:
    """Return the tensors of a Hugging Face directory that are missing or have other bits in another one.

    A second name of a tied output layer is no difference.
    """
    wanted, found = hf_tensors(source), hf_tensors(output)
    if json.loads((source / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]:
        wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    return sorted(
        name for name in wanted.keys() | found.keys() if not _same(wanted.get(name), found.get(name))
    )


def different_megatron(source: Path, checkpoint: Path) -> list[str]:
    """Return the keys of a ``torch_dist`` checkpoint, read by torch's own DCP, that differ from the oracle's.

    The oracle puts them together by hand from the Hugging Face directory. A vocabulary's padding is left out.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    wanted = megatron_tensors(source, config["vocab_size"])
    found = dict(_by_layer(stored_tensors(iteration(checkpoint))))
    wanted = dict(_by_layer(wanted))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in found:
            found[name] = found[name][: config["vocab_size"]]
    return sorted(key for key in wanted.keys() | found.keys() if not _same(wanted.get(key), found.get(key)))


def iteration(checkpoint: Path) -> Path:
    """Return the directory within a checkpoint that has the shards."""
    [metadata] = checkpoint.rglob(".metadata")
    return metadata.parent


def spoil(output: Path, distcp: bool) -> None:
    """Change one byte of an output's largest data file, within a tensor."""
    pattern = "*.distcp" if distcp else "*.safetensors"
    path = max(output.rglob(pattern), key=lambda file: file.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(_inside(path) if not distcp else path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def _inside(path: Path) -> int:
    """Return the offset of a byte in the middle of a safetensors file's data."""
    with safe_open(path, "pt"):  # it is one
        return path.stat().st_size // 2


def _by_layer(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with those of all layers and of all experts in one taken apart; without extra states."""
    for key, tensor in tensors.items():
        key = key.removeprefix("module.").removeprefix("model.")
        head, _, rest = key.partition("decoder.layers.")
        if "_extra_state" in key:
            continue
        if not head and rest and not rest.split(".")[0].isdigit():
            yield from ((f"decoder.layers.{number}.{rest}", one) for number, one in enumerate(tensor))
        else:
            yield key, tensor


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.shape == other.shape
        and one.dtype == other.dtype
        and bool(
            torch.equal(
                one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
            )
        )
    )
