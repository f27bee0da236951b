"""vLLM as a system: prompt logprobs of an engine that runs already, or that loads a checkpoint."""

import gc
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import require
from reshard.engines.vllm.compat import (
    end_batch_invariance,
    end_groups,
    is_batch_invariant,
    own_shared_memory,
)
from reshard.engines.vllm.layout import VllmLayout
from reshard.models.model import Model
from reshard.models.published import published
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.systems.base import ScoringOptions, System, SystemOptions
from reshard.parity.systems.outputs import score_with
from reshard.parity.systems.processes import check_processes, join_processes, release_memory
from reshard.storage.sources.base import read_config

KV_CACHE_BYTES = 1 << 30


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


class StartedVllm(System):
    """An engine that starts in the current processes when the first prompts come, with room for the
    longest."""

    def __init__(self, options: SystemOptions) -> None:
        require("vllm", "vllm")
        join_processes()
        self.options = options
        given = options.engine
        self.engine = given if isinstance(given, VllmLayout) else VllmLayout(tp=dist.get_world_size())
        if self.engine.pp > 1 or self.engine.dp > 1:
            raise ReshardError(
                f"vLLM at {self.engine} cannot be scored in processes of torchrun: use tp, and ep"
            )
        check_processes(f"vLLM at {self.engine}", self.engine.world_size)
        self.llm: Any = None

    @property
    def sizes(self) -> str:
        """The engine's sizes, its quantization and whether it is batch invariant, for the name."""
        also = [self.options.quantization or "", "batch invariant" * is_batch_invariant()]
        return ", ".join(filter(None, [str(self.engine), *also]))

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
        quantization = self.options.quantization
        if quantization is not None:
            options["quantization"] = quantization
        try:
            with _environment():
                from vllm import LLM
                from vllm.platforms import current_platform

                if not current_platform.device_type:
                    raise ReshardError("this vLLM finds no device to run on: its ordinary build needs a GPU")
                with own_shared_memory():
                    llm = LLM(
                        str(path),
                        dtype="float32" if self.options.dtype == "fp32" else "bfloat16",
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
            if not known and quantization is None:
                raise
            suffix = "" if quantization is None else f" with quantization {quantization}"
            raise ReshardError(f"vLLM cannot serve {path}{suffix}: {_reason(error)}") from error

    def close(self) -> None:
        if self.llm is not None:
            self.llm = None
            forget_engine()


class Vllm(StartedVllm):
    """A Hugging Face directory, loaded by vLLM itself."""

    def __init__(self, path: Path, options: SystemOptions) -> None:
        super().__init__(options)
        self.model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        self.path, self.name = path, f"vLLM, {path}, {self.sizes}, {options.dtype}"

    def start(self, context: int, routing: bool) -> None:
        self.llm = self.launch(self.path, context, routing)


def _reason(error: Exception) -> str:
    """Return the first message of an error of pydantic's, or the first line of another error."""
    errors = error.errors() if hasattr(error, "errors") else []
    return str(errors[0]["msg"])[:300] if errors else first_line(error)


def forget_engine() -> None:
    """End vLLM's process groups, and give torch's operators back, once no engine is left in this process; torch's own
    group stays."""
    end_groups()
    end_batch_invariance()
    gc.unfreeze()
    release_memory()


@contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that vLLM's ``external_launcher`` reads, where torchrun has not, while the
    context is open."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": str(dist.get_rank()),
                 "LOCAL_RANK": str(dist.get_rank()),
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
