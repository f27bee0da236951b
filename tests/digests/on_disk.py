"""The digest of a Hugging Face directory by safetensors and Python's whole numbers, without reshard's readers."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tests.digests import oracle

SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float8_e4m3fn": "float8_e4m3fn"}
ROUNDED = {"bf16": torch.bfloat16, "fp32": torch.float32}


def expected(
    directory: Path, fp32: str = "no such name", dtype: str | None = None
) -> tuple[str, dict[str, str]]:
    """The digest and the numbers of the tensors of a directory whose experts are stored one by one; in `dtype` all but
    those with `fp32` in their names count rounded to it."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    numbers, elements = {}, {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                tensor = file.get_tensor(name)
                if dtype is not None:
                    tensor = tensor.to(torch.float32 if fp32 in name else ROUNDED[dtype])
                held = str(tensor.dtype).removeprefix("torch.")
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                numbers[name] = oracle.number(name, held, list(tensor.shape), data)
                elements[SHORT[held]] = elements.get(SHORT[held], 0) + tensor.numel()
    label = "+".join(sorted(elements, key=lambda short: (-elements[short], short)))
    text = f"{label}:{sum(numbers.values()) % 2**64:016x}"
    return text, {name: f"{number:016x}" for name, number in numbers.items()}
