"""SGLang as a system: prompt logprobs of an engine or a server that runs already, or of one that loads a
checkpoint."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reshard.comm.http import call_route, is_address
from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import require
from reshard.engines.sglang.load import OPTION
from reshard.engines.sglang.weights.layout import SglangLayout
from reshard.models.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.served import checkpoint_of
from reshard.parity.systems.base import ScoringOptions, System, SystemOptions
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.opening import read_model
from reshard.storage.sources.paths import HF_FILES, config_beside, locate

# What a request asks for: the logprobs of its own tokens, and the best token at each place.
WANTED = {
    "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
}
SECONDS = 600.0  # that a server may take to answer
# Torch's own kernels, which run without a GPU.
ON_A_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}


class Sglang(System):
    """An SGLang. It gives logprobs of tokens, without whole distributions, and does not tell the experts
    that they went to. It runs in processes of its own, so one process asks for all."""

    spread = False

    @abstractmethod
    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Return SGLang's answers to prompts, with what is `WANTED`."""

    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        outputs = self.generate([list(prompt) for prompt in prompts])
        return [
            _scores(number, output["meta_info"], prompt)
            for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True))
        ]

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""


class LiveSglang(Sglang):
    """An SGLang that is already running, as its ``sglang.Engine``."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        arguments = engine.server_args
        self.model: Model = read_model(arguments.model_path)
        self.quantized = _is_quantized(self.model, arguments.quantization)
        self.name = f"SGLang, {arguments.model_path}, {arguments.dtype}"

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.engine.generate(input_ids=prompts, **WANTED)
        return answers


class ServedSglang(Sglang):
    """An SGLang that is already running, as the address of its server."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        path = checkpoint_of(f"sglang:{address}")
        info = call_route(self.address, "server_info")
        self.model: Model = read_model(path)
        self.quantized = _is_quantized(self.model, info.get("quantization"))
        self.name = f"SGLang at {address}, {path}, {info.get('dtype')}"

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        body = {"input_ids": prompts, **WANTED}
        answers: list[dict[str, Any]] = call_route(self.address, "generate", body, timeout=SECONDS)
        return answers


class StartedSglang(LiveSglang):
    """An SGLang that loads a Hugging Face directory, or the Megatron checkpoint `megatron` with the config in
    that directory, when the first prompts come."""

    def __init__(self, path: Path, options: SystemOptions, megatron: Path | None = None) -> None:
        require("sglang", "sglang")
        given = options.engine
        self.layout = given if isinstance(given, SglangLayout) else SglangLayout()
        self.path, self.dtype, self.engine, self.megatron = path, options.dtype, None, megatron
        self.model = read_model(str(path))
        self.layout.check(self.model)
        self.name = f"SGLang, {megatron or path}, {self.layout}, {options.dtype}"

    def generate(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        if self.engine is None:
            longest = int(self.model.config["max_position_embeddings"])
            self.engine = self._start(min(max(map(len, prompts)) + 8, longest))
            self.quantized = _is_quantized(self.model, None)
        return super().generate(prompts)

    def _start(self, context: int) -> Any:
        """Start an engine for prompts of almost `context` tokens. Raises ReshardError if SGLang
        cannot."""
        import sglang

        options: dict[str, Any] = {} if torch.cuda.is_available() else dict(ON_A_CPU)
        if self.megatron is not None:
            options["model_loader_extra_config"] = json.dumps({OPTION: str(self.megatron)})
        try:
            return sglang.Engine(
                model_path=str(self.path),
                dtype="float32" if self.dtype == "fp32" else "bfloat16",
                tp_size=self.layout.tp,
                ep_size=self.layout.ep,
                context_length=context,
                max_total_tokens=max(4096, 2 * context),
                skip_tokenizer_init=True,
                disable_cuda_graph=True,
                disable_radix_cache=True,
                random_seed=0,
                log_level="error",
                **options,
            )
        except Exception as error:
            raise ReshardError(
                f"SGLang cannot serve {self.megatron or self.path}: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None


def _is_quantized(model: Model, quantization: str | None) -> bool:
    """Tell whether SGLang serves quantized weights: by its own option, or since its checkpoint has them."""
    return quantization is not None or model.config.get("quantization_config") is not None


def open_served(place: str, megatron: bool, options: SystemOptions) -> Sglang:
    """Open a directory of either format, or what the server at an address serves."""
    if is_address(place):
        return ServedSglang(place)
    located = locate(Path(place)) if megatron else None
    if located is None:
        return StartedSglang(local_directory(place), options)
    beside = config_beside(located)
    if beside is None or beside.directory is None:
        raise ReshardError(
            f"{place} has no {HF_FILES}/config.json, in which SGLang looks for the model: convert it with reshard "
            f"mcore-to-hf, and serve that"
        )
    return StartedSglang(beside.directory, options, located.directory)


def _scores(number: int, answered: dict[str, Any], prompt: Prompt) -> Scores:
    """Read the scores of a prompt. Raises ReshardError, naming it, if there are other logprobs than
    of its tokens."""
    chosen = answered.get("input_token_logprobs") or []
    if [token for _, token, *_ in chosen] != list(prompt):
        raise ReshardError(
            f"prompt {number} has {len(prompt)} tokens, and the engine gives logprobs of others"
        )
    best = [entries[0][1] for entries in answered["input_top_logprobs"][1:]]
    return Scores(np.array([entry[0] for entry in chosen[1:]], np.float64), np.array(best))
