"""Systems that hold a model and can say how likely tokens are: transformers, and Megatron-Core."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.errors import ReshardError
from reshard.formats import torch_dist
from reshard.hub import local_directory
from reshard.layout import Layout
from reshard.live.build import build_megatron, initialize_parallel, without_gpu
from reshard.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.sources import MegatronSource, open_source, read_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class System(ABC):
    """A model that is ready to score prompts. `name` is for people, `model` its config."""

    name: str
    model: Model

    @abstractmethod
    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """``[batch, sequence, vocabulary]`` of right-padded token ids ``[batch, sequence]``; None on a rank that does not have them."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, so that the next system finds room."""

    def score(self, prompts: Sequence[Prompt], batch_size: int = 1, keep: int = 0) -> list[Scores]:
        """Score every prompt, `batch_size` at a time padded to the longest, keeping the distributions of up to `keep` positions of each.

        Without logits on this rank the list is empty.
        """
        found: list[Scores] = []
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        for batch in _batches(prompts, batch_size):
            longest = max(map(len, batch))
            tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in batch], device=device)
            with torch.no_grad():
                logits = self.logits(tokens)
            for row, prompt in enumerate(batch if logits is not None else ()):
                assert logits is not None
                found.append(_scores(logits[row, : len(prompt) - 1], prompt, keep))
        return found


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _scores(logits: torch.Tensor, prompt: Prompt, keep: int) -> Scores:
    logprobs = torch.log_softmax(logits.float(), -1)
    following = torch.tensor(prompt[1:], device=logits.device)
    chosen = logprobs.gather(1, following[:, None])[:, 0]
    kept = logprobs[:keep].cpu().numpy() if keep else None
    return Scores(chosen.double().cpu().numpy(), logprobs.argmax(-1).cpu().numpy(), kept)


class HuggingFace(System):
    """A Hugging Face directory in transformers."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.name = f"transformers, {path}, {dtype}"
        self.model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        self.path, self.dtype = path, dtype

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model, loaded where it is first asked for: of several processes one is enough."""
        from transformers import AutoModelForCausalLM

        try:
            module = AutoModelForCausalLM.from_pretrained(self.path, dtype=DTYPES[self.dtype], attn_implementation="eager")
        except (OSError, ValueError, RuntimeError) as error:
            raise ReshardError(f"transformers cannot load {self.path}: {str(error).splitlines()[0]}") from error
        return module.eval().cuda() if torch.cuda.is_available() else module.eval()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        # Right padding: no token before it sees it, so that no mask is needed.
        return self.module(tokens).logits

    def close(self) -> None:
        vars(self).pop("module", None)


class Megatron(System):
    """A Megatron checkpoint, loaded by Megatron-Core's own code into its own modules, at any layout.

    Under torchrun every rank makes one; the logits are on the ranks of the last pipeline stage.
    """

    def __init__(self, path: Path, dtype: str, layout: Layout, hf_config: Path | None = None) -> None:
        source = open_source(path, hf_config)  # so that no pickle is loaded that was not looked at
        if not isinstance(source, MegatronSource):
            raise ReshardError(f"{path} is no Megatron checkpoint")
        directory, self.model = source.checkpoint.directory, source.model
        source.close()
        self.name = f"Megatron-Core, {path}, {layout}, {dtype}"
        join_processes()
        needed, there = layout.world_size(self.model), dist.get_world_size()
        if there % needed:
            raise ReshardError(f"{layout} needs {needed} processes or a multiple of them, and there are {there}: start it with "
                               f"torchrun --nproc-per-node {needed} --no-python reshard ...")  # fmt: skip
        impl = "transformer_engine" if torch.cuda.is_available() else "local"
        with without_gpu():
            initialize_parallel(layout)
            options = {} if torch.cuda.is_available() else {"use_cpu_initialization": True, "masked_softmax_fusion": False}
            self.models = build_megatron(self.model, layout, transformer_impl=impl, dtype=DTYPES[dtype], parallel_output=False, **options)
            self.models = [m.to(DTYPES[dtype]).eval() for m in self.models]
            self._load(directory)

    def _load(self, directory: Path) -> None:
        """By Megatron-Core's own loader, strictly."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.core import CheckpointingException

        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(self.models)}  # type: ignore[operator]
        try:
            loaded = dist_checkpointing.load(state, str(directory))
        except (CheckpointingException, RuntimeError, ValueError, KeyError) as error:
            raise ReshardError(f"Megatron-Core cannot load {directory}: {str(error).strip().splitlines()[0]}") from error
        for i, model in enumerate(self.models):
            model.load_state_dict(loaded[f"model{i}"])

    def close(self) -> None:
        from megatron.core import parallel_state

        self.models = []
        parallel_state.destroy_model_parallel()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        from megatron.core import parallel_state

        stages, stage = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_rank()
        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(batch, length)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        out = None
        last = len(self.models) * stages - 1
        with without_gpu():
            for index in range(last + 1):
                if index % stages != stage:
                    continue
                model: Any = self.models[index // stages]
                if index:
                    hidden = out
                    if stages > 1:
                        hidden = torch.empty(length, batch, model.config.hidden_size, dtype=model.config.params_dtype, device=tokens.device)
                        dist.recv(hidden, ranks[(index - 1) % stages])
                    model.set_input_tensor(hidden)
                out = model(tokens, positions, mask)
                if index < last and stages > 1:
                    dist.send(out.contiguous(), ranks[(index + 1) % stages])
        return out[..., : self.model.symbols["V"]] if out is not None and stage == stages - 1 else None


def open_system(spec: str, dtype: str, layout: Layout, hf_config: Path | None = None) -> System:
    """A system from a path or hub id: a Hugging Face directory (transformers) or a Megatron checkpoint (Megatron-Core at `layout`)."""
    path = local_directory(spec)
    return Megatron(path, dtype, layout, hf_config) if torch_dist.find(path) is not None else HuggingFace(path, dtype)


def scores_of(system: System, prompts: Sequence[Prompt], batch_size: int, keep: int) -> list[Scores]:
    """A system's scores, on every rank."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if not isinstance(system, Megatron):
        mine = system.score(prompts, batch_size, keep) if alone or dist.get_rank() == 0 else []
    else:
        mine = system.score(prompts, batch_size, keep)
    if alone:
        return mine
    gathered: list[list[Scores]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return next(some for some in gathered if some)


def join_processes() -> None:
    """The process group that torchrun has prepared, or one of this process alone, which Megatron needs too."""
    if dist.is_initialized():
        return
    backend, launched = "gloo", "RANK" in os.environ
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
