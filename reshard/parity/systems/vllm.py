"""vLLM as a system: prompt logprobs of a checkpoint that it loads itself, or of a Megatron model
that refits it."""

import gc
import json
import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import require
from reshard.engines.vllm.compat import end_groups, own_shared_memory, plain_weights
from reshard.engines.vllm.layout import VllmLayout
from reshard.engines.vllm.live import VllmModel
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.models.published import published
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.routing import Choices
from reshard.parity.systems.base import (
    ScoringOptions,
    System,
    check_processes,
    join_processes,
    release_memory,
)
from reshard.refit import RefitGroup, connect
from reshard.storage.sources.base import read_config
from reshard.trainers.megatron import MegatronModel

KV_CACHE_BYTES = 1 << 30
# Most logprobs of whole distributions to ask an engine for: each is a Python number.
KEPT_LOGPROBS = 1 << 22


class LiveVllm(System):
    """A vLLM that is already running, as its ``LLM``."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        config = llm.llm_engine.vllm_config.model_config
        self.quantized = config.quantization is not None
        self.name = f"vLLM, {config.model}, {str(config.dtype).removeprefix('torch.')}"
        self.model = Model.from_hf(
            published(config.hf_config.to_dict(), "vLLM's config"), f"vLLM's config of {config.model}"
        )

    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        return score_with(self.llm, prompts, options, self.model)

    def close(self) -> None:
        """Do nothing: the engine belongs to the caller."""


class _OwnVllm(System):
    """An engine that starts in the current processes when the first prompts come, with room for the
    longest."""

    def __init__(self, engine: VllmLayout | None, dtype: str, quantization: str | None) -> None:
        require("vllm", "vllm")
        join_processes()
        self.engine = engine or VllmLayout(tp=dist.get_world_size())
        if self.engine.pp > 1 or self.engine.dp > 1:
            raise ReshardError(
                f"vLLM at {self.engine} cannot be scored in processes of torchrun: use tp, and ep"
            )
        check_processes(f"vLLM at {self.engine}", self.engine.world_size)
        self.dtype, self.quantization = dtype, quantization
        self.llm: Any = None

    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        self.engine.check(self.model)
        if self.llm is None:
            self.start(max(map(len, prompts)) + 1, options.routing)
        return score_with(self.llm, prompts, options, self.model)

    @abstractmethod
    def start(self, context: int, routing: bool) -> None:
        """Start `llm` for prompts of up to `context` - 1 tokens."""

    def launch(self, path: Path, context: int, routing: bool, **options: Any) -> Any:
        """Start an ``LLM`` of a Hugging Face directory."""
        if self.quantization is not None:
            options["quantization"] = self.quantization
        try:
            with _environment():
                from vllm import LLM
                from vllm.platforms import current_platform

                if not current_platform.device_type:
                    raise ReshardError("this vLLM finds no device to run on: its ordinary build needs a GPU")
                with own_shared_memory():
                    llm = LLM(
                        str(path),
                        dtype="float32" if self.dtype == "fp32" else "bfloat16",
                        tensor_parallel_size=self.engine.tp,
                        enable_expert_parallel=self.engine.expert_parallel,
                        expert_placement_strategy="round_robin" if self.engine.round_robin else "linear",
                        distributed_executor_backend="external_launcher",
                        max_model_len=context,
                        max_num_batched_tokens=max(context, 2048),
                        skip_tokenizer_init=True,
                        enforce_eager=True,
                        enable_prefix_caching=False,
                        max_logprobs=-1,
                        seed=0,
                        use_tqdm_on_load=False,
                        gpu_memory_utilization=_share_of_memory(),
                        kv_cache_memory_bytes=KV_CACHE_BYTES,
                        disable_log_stats=True,
                        enable_return_routed_experts=routing and bool(self.model.num_experts),
                        **options,
                    )
            self.quantized = llm.llm_engine.vllm_config.model_config.quantization is not None
            return llm
        except ReshardError:
            raise
        except Exception as error:
            known = isinstance(error, (ValueError, RuntimeError, NotImplementedError, OSError))
            if not known and self.quantization is None:
                raise
            suffix = "" if self.quantization is None else f" with quantization {self.quantization}"
            raise ReshardError(f"vLLM cannot serve {path}{suffix}: {_reason(error)}") from error

    def close(self) -> None:
        if self.llm is not None:
            self.llm = None
            forget_engine()


class Vllm(_OwnVllm):
    """A Hugging Face directory, loaded by vLLM itself."""

    def __init__(
        self, path: Path, dtype: str, engine: VllmLayout | None = None, quantization: str | None = None
    ) -> None:
        super().__init__(engine, dtype, quantization)
        self.model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        self.path, self.name = path, f"vLLM, {path}, {_describe(self)}, {dtype}"

    def start(self, context: int, routing: bool) -> None:
        self.llm = self.launch(self.path, context, routing)


class RefittedVllm(_OwnVllm):
    """A vLLM that starts with dummy weights and is refitted from the Megatron-Core model of a
    checkpoint, at a layout."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        layout: MegatronLayout,
        hf_config: Path | None = None,
        engine: VllmLayout | None = None,
        quantization: str | None = None,
        match_vllm_rounding: bool = False,
    ) -> None:
        from reshard.parity.systems.megatron import Megatron

        super().__init__(engine, dtype, quantization)
        self.match_vllm_rounding = match_vllm_rounding
        self.trainer: Megatron | None = Megatron(path, dtype, layout, hf_config)
        self.model = self.trainer.model
        self.name = f"vLLM, refitted from {self.trainer.name.partition(', ')[2]} to {_describe(self)}"

    def start(self, context: int, routing: bool) -> None:
        assert self.trainer is not None
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.model.config), encoding="utf-8")
            with plain_weights():
                self.llm = self.launch(Path(folder), context, routing, load_format="dummy")
        link = connect(
            RefitGroup.of_process_group(),
            MegatronModel(self.trainer.models),
            VllmModel.from_llm(self.llm, self.match_vllm_rounding),
        )
        with closing(link):
            link.refit(verify=True)
        self._end_trainer()

    def _end_trainer(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def close(self) -> None:
        self._end_trainer()
        super().close()


def _reason(error: Exception) -> str:
    """Return the first message of an error of pydantic's, or the first line of another error."""
    errors = error.errors() if hasattr(error, "errors") else []
    return str(errors[0]["msg"])[:300] if errors else first_line(error)


def _describe(engine: _OwnVllm) -> str:
    return str(engine.engine) if engine.quantization is None else f"{engine.engine}, {engine.quantization}"


def forget_engine() -> None:
    """End vLLM's process groups once no engine is left in this process; torch's own group stays."""
    end_groups()
    gc.unfreeze()
    release_memory()


@contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that vLLM's ``external_launcher`` reads, where torchrun has not, while the
    context is open."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()),
              "WORLD_SIZE": str(dist.get_world_size()), "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _share_of_memory() -> float:
    """Return the share of the device's memory that a refit's trainer leaves. The cache has a fixed
    size, so vLLM takes no more than it needs."""
    if not torch.cuda.is_available():
        return 0.9
    free, total = torch.cuda.mem_get_info()
    return round(0.9 * free / total, 2)


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
