"""Scores from an ``LLM`` of vLLM's, and from its outputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.routing import Choices
from reshard.parity.systems.base import ScoringOptions

# Most logprobs of whole distributions to ask an engine for: each is a Python number.
KEPT_LOGPROBS = 1 << 22


def score_with(llm: Any, prompts: Sequence[Prompt], options: ScoringOptions, model: Model) -> list[Scores]:
    """Score prompts with an ``LLM``, which batches them itself."""
    from vllm import SamplingParams

    def generate(batch: Sequence[Prompt], logprobs: int) -> list[Any]:
        sampling = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=logprobs, detokenize=False, flat_logprobs=True
        )
        return llm.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False)

    scores = scores_of_outputs(generate(prompts, 1), prompts, model)
    keep = min(options.keep, KEPT_LOGPROBS // model.symbols["V"])
    if 0 <= llm.llm_engine.vllm_config.model_config.max_logprobs < model.symbols["V"]:
        keep = 0  # started without max_logprobs=-1: it does not give whole distributions
    if not keep:
        return scores
    heads = [
        prompt[: n + 1]
        for prompt, n in zip(prompts, replace(options, keep=keep).kept_of(len(prompts)), strict=True)
        if n
    ]
    kept = [_distributions(output.prompt_logprobs, model.symbols["V"]) for output in generate(heads, -1)]
    first = [replace(s, distributions=rows) for s, rows in zip(scores[: len(kept)], kept, strict=True)]
    return first + scores[len(kept) :]


def scores_of_outputs(
    outputs: Sequence[Any], prompts: Sequence[Prompt], model: Model | None = None
) -> list[Scores]:
    """Read the scores of `prompts` from vLLM's ``RequestOutput``, for requests with
    ``prompt_logprobs=1`` or more.

    With `model` the experts that it routed to are read too, where it returned them. Raises
    ReshardError, naming the prompt, where there are fewer logprobs than tokens.
    """
    if len(outputs) != len(prompts):
        raise ReshardError(f"the engine gives {len(outputs)} outputs for {len(prompts)} prompts")
    scores = []
    for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        positions = list(output.prompt_logprobs or ())
        if len(positions) != len(prompt):
            returned = max(len(positions) - 1, 0)
            raise ReshardError(
                f"prompt {number} has {len(prompt)} tokens, the engine gives logprobs of "
                f"{returned} instead of {len(prompt) - 1}: ask for prompt_logprobs=1"
            )
        chosen, best = [], []
        for index, (token, entries) in enumerate(zip(prompt[1:], positions[1:], strict=True), 1):
            if not entries or token not in entries:
                raise ReshardError(
                    f"prompt {number}: the engine gives no logprob for token {index}, which is {token}"
                )
            chosen.append(entries[token].logprob)
            best.append(min(entries, key=lambda other: entries[other].rank))
        scores.append(
            Scores(np.array(chosen, np.float64), np.array(best), None, _choices(output, len(prompt), model))
        )
    return scores


def _distributions(positions: Any, vocabulary: int) -> np.ndarray:
    """Return flat logprobs of all tokens as ``[positions, vocabulary]``. Ids beyond the vocabulary
    are padding."""
    rows = np.full((len(positions) - 1, vocabulary), -np.inf, np.float32)
    tokens, values = np.array(positions.token_ids), np.array(positions.logprobs, np.float32)
    for row, (start, end) in enumerate(
        zip(positions.start_indices[1:], positions.end_indices[1:], strict=True)
    ):
        inside = tokens[start:end] < vocabulary
        rows[row, tokens[start:end][inside]] = values[start:end][inside]
    return rows


def _choices(output: Any, length: int, model: Model | None) -> Choices | None:
    routed = getattr(output.outputs[0], "routed_experts", None) if output.outputs else None
    if routed is None or model is None:
        return None
    experts = np.sort(routed[: length - 1, list(model.moe_layers)].astype(np.int64), -1)
    # Where vLLM's kernels choose the experts themselves, it returns a buffer that nothing was
    # written to.
    return Choices(model.moe_layers, experts, None) if (np.diff(experts) > 0).all() else None
