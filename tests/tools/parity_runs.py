"""Comparisons of small checkpoints on ranks of their own, and copies of checkpoints that differ in
one thing."""

import json
import shutil
import subprocess
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from reshard import MegatronLayout
from tests.starting.ranks import run_on_ranks
from tests.starting.warm import python_of_trainer


def ranks_of(sizes: dict) -> int:
    """Return the number of ranks of a layout with these sizes."""
    layout = MegatronLayout(**sizes)
    return layout.pp * max(layout.tp, layout.ep * layout.expert_tp)


def run(a, b, layout=None, **options):
    """Compare two systems on ranks of their own; return the report, or the error, which is the same
    on all ranks."""
    arguments = str(a), str(b), layout or {}, {"prompts": 4, "lengths": (9, 33)} | options
    results = run_on_ranks(ranks_of(layout or {}), "run", *arguments, module="parity_on_cpu")
    assert all(result == results[0] for result in results)
    return results[0]


def parity_command(*arguments) -> subprocess.CompletedProcess:
    """Run ``reshard parity`` with these arguments to its end."""
    command = [python_of_trainer(), "-m", "reshard", "parity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def change_config(directory: Path, **fields) -> None:
    """Set fields of a config; fields that are None are removed."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | fields
    kept = {name: value for name, value in config.items() if value is not None or name not in fields}
    path.write_text(json.dumps(kept), encoding="utf-8")


def with_a_fault(source: Path, directory: Path, name: str, factor: float) -> Path:
    """Copy a Hugging Face directory with one tensor scaled."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def with_tokenizer(source: Path, directory: Path, words: list[str]) -> Path:
    """Copy a Hugging Face directory and give it a tokenizer of whole words."""
    shutil.copytree(source, directory)
    vocabulary = {word: i for i, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    return directory
