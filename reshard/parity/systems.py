"""Systems that hold a model and can say how likely tokens are. Here: what they have in common, and
transformers.

Megatron-Core and vLLM have modules of their own beside this one.
"""

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.noise import SHARE_IN_FP32, SHARE_IN_TF32
from reshard.parity.prompts import Prompt
from reshard.parity.routing import Choices

Name = TypeVar("Name")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ScoringOptions:
    """How prompts are scored: `batch_size` at a time, padded on the right to the longest or `packed` into one
    sequence; `keep` positions of all together keep their distribution; with `routing` the chosen experts are
    noted. `positions` are those of the tokens of a single prompt, where they are not 0, 1, 2 ...; it is for systems
    that take `positions`."""

    batch_size: int = 1
    packed: bool = False
    keep: int = 0
    routing: bool = False
    positions: tuple[int, ...] | None = None

    def kept_of(self, prompts: int) -> list[int]:
        """Of how many positions each of so many prompts keeps the distributions: shared evenly, and where
        they are too few for that, of one position of the first prompts."""
        share = max(1, self.keep // prompts)
        return [min(share, max(0, self.keep - i * share)) for i in range(prompts)]


class System(ABC):
    """A model that is ready to score prompts. `name` is for people, `model` its config; where it is not
    `spread`, any one process will do, and otherwise all of them score together. `quantized`, when it has scored,
    says whether it did so with quantized weights; `takes_positions`, whether it can score tokens at positions that jump."""

    name: str
    model: Model
    spread = True
    quantized = False
    takes_positions = False

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], how: ScoringOptions) -> list[Scores]:
        """Score every prompt; empty on a rank that does not have the result."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory, so that the next system finds room."""


class ForwardSystem(System):
    """A system whose modules run in this process, and give the logits of all tokens."""

    takes_positions = True

    @abstractmethod
    def logits(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """``[batch, sequence, vocabulary]`` of token ids ``[batch, sequence]``; None on a rank that does not
        have them.

        Prompts are padded on the right, or, with their `lengths`, packed one after the other in a batch of
        one. With `positions` the tokens of one prompt stand there instead of at 0, 1, 2 ...
        """

    @abstractmethod
    def roots(self) -> Sequence[torch.nn.Module]:
        """The models that this rank runs."""

    def layers_to_round(self) -> Iterator[torch.nn.Module]:
        """The modules with matrices that an engine with quantized weights quantizes: those of the layers but their
        routers."""
        routers = set(self.routers().values())
        for root in self.roots():
            for name, module in root.named_modules():
                matrices = any(p.ndim > 1 for p in module.parameters(recurse=False))
                if matrices and "layers." in name and module not in routers:
                    yield module

    @abstractmethod
    def routers(self) -> dict[int, torch.nn.Module]:
        """The routers of this rank's MoE layers, by layer."""

    @abstractmethod
    def choices(self, router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What a router chose in a forward: experts ``[batch, sequence, top k]``, and the scores ``[batch,
        sequence, experts]`` that it chose by, the larger the better."""

    def gathered(self, noted: dict[int, Any]) -> dict[int, Any]:
        """What was noted by layer, of all ranks."""
        return noted

    def score(self, prompts: Sequence[Prompt], how: ScoringOptions) -> list[Scores]:
        """Score every prompt. Without logits on this rank the list is empty."""
        found: list[Scores] = []
        there, kept = device(), how.kept_of(len(prompts))
        for start in range(0, len(prompts), how.batch_size):
            batch = prompts[start : start + how.batch_size]
            lengths = [len(prompt) for prompt in batch]
            if how.packed:
                tokens = torch.tensor([[token for prompt in batch for token in prompt]], device=there)
                spans = [(0, sum(lengths[:i]), n) for i, n in enumerate(lengths)]
            else:
                tokens = torch.tensor(
                    [prompt + [0] * (max(lengths) - len(prompt)) for prompt in batch], device=there
                )
                spans = [(i, 0, n) for i, n in enumerate(lengths)]
            with torch.no_grad(), self._noting(how.routing, tokens.shape) as noted:
                logits = self.logits(tokens, lengths if how.packed else None, how.positions)
            routed = self.gathered(noted) if how.routing else {}
            if logits is None:
                continue
            for (row, at, n), prompt in zip(spans, batch, strict=True):
                choices = _choices_at(routed, row, at, n - 1)
                found.append(_scores(logits[row, at : at + n - 1], prompt, kept[len(found)], choices))
        return found

    @contextmanager
    def _noting(self, wanted: bool, shape: Sequence[int]) -> Iterator[dict[int, Any]]:
        """While it is open, what the routers choose, by layer."""
        noted: dict[int, Any] = {}

        def note(layer: int, *forward: Any) -> None:
            noted[layer] = tuple(t.view(*shape, -1).cpu() for t in self.choices(*forward))

        with hooked(self.routers() if wanted else {}, note):
            yield noted


@contextmanager
def hooked(
    modules: Mapping[Name, torch.nn.Module], note: Callable[[Name, Any, Any, Any], None]
) -> Iterator[None]:
    """While it is open, `note` is told of every forward of the modules: (name, module, inputs, output)."""
    handles = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def of_all_ranks(entries: dict[Name, Any]) -> dict[Name, Any]:
    """The ranks' entries together, on every rank; of one that several have, the last rank's."""
    everyone: list[dict[Name, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, entries)
    return {name: entry for some in everyone for name, entry in some.items()}


def device() -> torch.device:
    """Where this process's modules and prompts go."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def share_in_fp32() -> float:
    """Of their rounding in bf16, what two systems may still differ by in fp32 here."""
    return SHARE_IN_TF32 if device().type == "cuda" else SHARE_IN_FP32


def release_memory() -> None:
    """Give back what no object holds any more, so that another library finds it free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _choices_at(noted: Mapping[int, Any], row: int, at: int, count: int) -> Choices | None:
    if not noted:
        return None
    layers = sorted(noted)
    experts, scores = (
        np.stack([noted[layer][i][row, at : at + count].numpy() for layer in layers], 1) for i in (0, 1)
    )
    return Choices(tuple(layers), np.sort(experts, -1), scores)


def _scores(logits: torch.Tensor, prompt: Prompt, keep: int, choices: Choices | None) -> Scores:
    logprobs = torch.log_softmax(logits.float(), -1)
    following = torch.tensor(prompt[1:], device=logits.device)
    chosen = logprobs.gather(1, following[:, None])[:, 0]
    kept = logprobs[:keep].cpu().numpy() if keep else None
    return Scores(chosen.double().cpu().numpy(), logprobs.argmax(-1).cpu().numpy(), kept, choices)


def scores_of(system: System, prompts: Sequence[Prompt], how: ScoringOptions) -> list[Scores]:
    """A system's scores, on every rank. What one rank refuses, all refuse."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return system.score(prompts, how)
    mine: list[Scores] | ReshardError = []
    if system.spread or dist.get_rank() == 0:
        try:
            mine = system.score(prompts, how)
        except ReshardError as error:
            mine = error
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    for entry in gathered:
        if isinstance(entry, ReshardError):
            raise entry
    return next(scores for scores in gathered if scores)


def check_processes(what: str, needed: int, replicas: bool = False) -> None:
    """Raise ReshardError unless there are as many processes as `what` needs, or, with `replicas`, a multiple
    of that."""
    there = dist.get_world_size()
    if there % needed if replicas else there != needed:
        raise ReshardError(
            f"{what} needs {needed} processes{' or a multiple of them' * replicas}, and "
            f"there are {there}: start it with torchrun --nproc-per-node "
            f"{needed} --no-python reshard ..."
        )


def join_processes() -> None:
    """The process group that torchrun has prepared, or one of this process alone, which Megatron needs
    too."""
    if dist.is_initialized():
        return
    backend, launched = "gloo", "RANK" in os.environ
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if launched:
        try:
            dist.init_process_group(backend)
        except ValueError as error:
            given = ", ".join(
                f"{name}={os.environ.get(name)}"
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            )
            raise ReshardError(
                f"the environment does not describe the processes of a run ({given}): start "
                f"them with torchrun"
            ) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
