"""SGLang as a system: prompt logprobs of an engine that runs already."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.systems.base import ScoringOptions, System
from reshard.storage.sources.opening import read_model


class LiveSglang(System):
    """An SGLang that is already running, as its ``sglang.Engine``.

    It gives logprobs of tokens, without whole distributions, and does not tell the experts that they
    went to.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        arguments = engine.server_args
        self.quantized = arguments.quantization is not None
        self.name = f"SGLang, {arguments.model_path}, {arguments.dtype}"
        self.model: Model = read_model(arguments.model_path)

    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        outputs = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        return [
            _scores(number, output["meta_info"], prompt)
            for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True))
        ]

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""


def _scores(number: int, answered: dict[str, Any], prompt: Prompt) -> Scores:
    """Read the scores of a prompt. Raises ReshardError, naming it, where there are other logprobs than
    of its tokens."""
    chosen = answered.get("input_token_logprobs") or []
    if [token for _, token, *_ in chosen] != list(prompt):
        raise ReshardError(
            f"prompt {number} has {len(prompt)} tokens, and the engine gives logprobs of others"
        )
    best = [entries[0][1] for entries in answered["input_top_logprobs"][1:]]
    return Scores(np.array([entry[0] for entry in chosen[1:]], np.float64), np.array(best))
