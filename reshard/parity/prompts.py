"""Prompts: token ids to be teacher-forced through both systems."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import importing
from reshard.models.model import Model
from reshard.parity.served import checkpoint_of
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.paths import HF_FILES, locate

Prompt = list[int]


def random_prompts(count: int, vocabulary: int, lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of random tokens, with `lengths` in turn."""
    random = np.random.default_rng(seed)
    return [random.integers(0, vocabulary, lengths[i % len(lengths)]).tolist() for i in range(count)]


class FarPrompt(NamedTuple):
    """A prompt of short runs of tokens that are far apart, at `positions`."""

    prompt: Prompt
    positions: tuple[int, ...]


# Tokens of each run, and the last position that is tried: beyond it rotary angles in fp32 are too
# inexact.
RUN, LAST_POSITION = 32, 1 << 15


def far_prompt(model: Model, longest: int, seed: int = 0) -> FarPrompt | None:
    """Make a prompt of a few tokens up to the end of the model's context, and on both sides of
    where its rotary scaling begins; None if prompts of `longest` tokens reach as far."""
    context = min(int(model.config["max_position_embeddings"]), LAST_POSITION)
    last = context - RUN
    if last < longest:
        return None
    scaled = model.rope().get("original_max_position_embeddings")
    starts = {0, context // 16, context // 4, last}
    if isinstance(scaled, (int, float)):
        starts |= {int(scaled) - RUN, int(scaled)}
    runs = list[int]()
    for start in sorted(start for start in starts if 0 <= start <= last):
        if not runs or start >= runs[-1] + RUN:
            runs.append(start)
    positions = tuple(position for start in runs for position in range(start, start + RUN))
    [prompt] = random_prompts(1, model.symbols["V"], [len(positions)], seed)
    return FarPrompt(prompt, positions)


def tokenizer_of(systems: Sequence[str]) -> Callable[[str], list[int]] | None:
    """Return the systems' tokenizer as a function from text to ids; None without any.

    Raises ReshardError if two have different ones.
    """
    tokenizer = _tokenizer(systems)
    return None if tokenizer is None else lambda text: list(tokenizer(text)["input_ids"])


def token_texts(systems: Sequence[str], prompts: Sequence[Prompt]) -> list[list[str]] | None:
    """Return the text of each token of each prompt by the systems' tokenizer; None without any.

    Raises ReshardError if two have different ones.
    """
    tokenizer = _tokenizer(systems)
    if tokenizer is None:
        return None
    return [[tokenizer.decode([token]) for token in prompt] for prompt in prompts]


def _tokenizer(systems: Sequence[str]) -> Any:
    """Load the tokenizer that lies beside the systems; None without any."""
    with importing("parity"):
        from transformers import AutoTokenizer

    tokenizers: dict[str, Any] = {}
    for system in systems:
        path = local_directory(checkpoint_of(system))
        checkpoint = locate(path)
        for folder in (
            path,
            path / HF_FILES,
            *([checkpoint.root / HF_FILES] if checkpoint is not None else []),
        ):
            if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
                try:
                    tokenizers.setdefault(system, AutoTokenizer.from_pretrained(folder))
                except (OSError, ValueError) as error:
                    raise ReshardError(
                        f"the tokenizer of {folder} cannot be read: {first_line(error)}"
                    ) from error
    if not tokenizers:
        return None
    (first_system, first), *other_systems = tokenizers.items()
    for other, tokenizer in other_systems:
        if tokenizer.get_vocab() != first.get_vocab():
            raise ReshardError(
                f"the tokenizers of {first_system} and {other} differ: they do not hold the same model"
            )
    return first


def read_prompts(path: Path, tokenizer: Callable[[], Callable[[str], list[int]] | None]) -> list[Prompt]:
    """Read prompts from a file: a line each, as text, or as JSON with ``text`` or ``tokens`` (a
    list of ids).

    `tokenizer` returns a function from text to ids; it is called if a line is text. Raises
    ReshardError where the file cannot be read or a line is neither.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ReshardError(
            f"cannot read the prompts in {path}: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from error
    if not lines:
        raise ReshardError(f"{path} has no prompts")
    cached = cache(tokenizer)
    return [_prompt(line, f"{path}, prompt {number}", cached) for number, line in enumerate(lines)]


def _prompt(line: str, where: str, tokenizer: Any) -> Prompt:
    text: Any = line
    if line.lstrip().startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ReshardError(f"{where} begins like JSON and is none: {error}") from error
        tokens, text = entry.get("tokens"), entry.get("text")
        if isinstance(tokens, list) and all(type(t) is int for t in tokens):
            return tokens
        if not isinstance(text, str):
            raise ReshardError(f"{where} has neither text nor a list of tokens")
    encode = tokenizer()
    if encode is None:
        raise ReshardError(
            f'{where} is text, and neither system has a tokenizer: give lines such as {{"tokens": [1, 2, 3]}}'
        )
    return encode(text)


def check_prompts(prompts: Sequence[Prompt], vocabulary: int, context: int) -> None:
    """Raise ReshardError, naming the prompt, for one that is too short or too long, or has a token
    that the model does not have."""
    if not prompts:
        raise ReshardError("there are no prompts")
    for number, prompt in enumerate(prompts):
        if len(prompt) < 2:
            raise ReshardError(f"prompt {number} has {len(prompt)} tokens: there is nothing to predict")
        if len(prompt) > context:
            raise ReshardError(
                f"prompt {number} has {len(prompt)} tokens, more than the model's context of {context}"
            )
        unknown = [token for token in prompt if not 0 <= token < vocabulary]
        if unknown:
            raise ReshardError(
                f"prompt {number} has token {unknown[0]}, which a vocabulary of {vocabulary} does not have"
            )
