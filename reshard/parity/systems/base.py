"""Systems that hold a model and score prompts: the interface, and what those that run in this
process share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError
from reshard.engines.layout import EngineLayout
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.parity.metrics import Scores
from reshard.parity.prompts import Prompt
from reshard.parity.routing import Choices
from reshard.parity.systems.processes import device

Name = TypeVar("Name")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class SystemOptions:
    """Options with which a path is opened as a system. `dtype` is ``fp32`` or ``bf16``, `layout`
    Megatron-Core's; `hf_config` is the config of a Megatron checkpoint that has none. `engine` are
    the sizes of an engine (default: TP over all processes). Of vLLM: the `quantization` that it is
    started with, and whether a refit rounds as its own loading does (`match_vllm_rounding`)."""

    dtype: str = "fp32"
    layout: MegatronLayout = field(default_factory=MegatronLayout)
    hf_config: Path | None = None
    engine: EngineLayout | None = None
    quantization: str | None = None
    match_vllm_rounding: bool = False


@dataclass(frozen=True)
class ScoringOptions:
    """Options of scoring. `batch_size` prompts go together, padded on the right to the longest or
    `packed` into one sequence; `keep` positions of all prompts together keep their distribution;
    with `routing` the chosen experts are recorded. `positions` are those of the tokens of a single
    prompt, where they are not 0, 1, 2 ...; only systems with `takes_positions` accept them."""

    batch_size: int = 1
    packed: bool = False
    keep: int = 0
    routing: bool = False
    positions: tuple[int, ...] | None = None

    def kept_of(self, prompts: int) -> list[int]:
        """Return how many positions of each prompt keep their distributions: an equal share, or,
        where `keep` is smaller than the number of prompts, one position of the first ones."""
        share = max(1, self.keep // prompts)
        return [min(share, max(0, self.keep - i * share)) for i in range(prompts)]


class System(ABC):
    """A model that is ready to score prompts.

    `name` is for people, `model` its config. If it is `spread`, all processes score together;
    otherwise one is enough. `quantized`, known after scoring, is True if it served quantized
    weights; `takes_positions` if it can score tokens at positions that are not 0, 1, 2 ..."""

    name: str
    model: Model
    spread = True
    quantized = False
    takes_positions = False

    @abstractmethod
    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        """Score every prompt. Return an empty list on a rank without the result."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory for the next system."""


class ForwardSystem(System):
    """A system whose modules run in this process and return the logits of all tokens."""

    takes_positions = True

    @abstractmethod
    def logits(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Return logits ``[batch, sequence, vocabulary]`` of token ids ``[batch, sequence]``, or
        None on a rank without them.

        Prompts are padded on the right, or, with their `lengths`, packed one after the other in a
        batch of one. `positions` are those of the tokens of one prompt (default: 0, 1, 2 ...).
        """

    @abstractmethod
    def roots(self) -> Sequence[torch.nn.Module]:
        """Return the models that this rank runs."""

    def layers_to_round(self) -> Iterator[torch.nn.Module]:
        """Yield the modules whose matrices an engine would quantize: those of the layers, except
        routers."""
        routers = set(self.routers().values())
        for root in self.roots():
            for name, module in root.named_modules():
                matrices = any(p.ndim > 1 for p in module.parameters(recurse=False))
                if matrices and "layers." in name and module not in routers:
                    yield module

    @abstractmethod
    def routers(self) -> dict[int, torch.nn.Module]:
        """Return the routers of this rank's MoE layers, by layer."""

    @abstractmethod
    def indexers(self) -> dict[int, torch.nn.Module]:
        """Return the attention of this rank's layers that have an indexer of their own, which chooses the tokens to
        attend to, by layer."""

    @abstractmethod
    def choices(self, router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts ``[batch, sequence, top k]`` that a router chose in a forward, and the
        scores ``[batch, sequence, experts]`` that it chose by, the larger the better."""

    def gather_choices(self, recorded: dict[int, Any]) -> dict[int, Any]:
        """Return the choices recorded on all ranks, by layer."""
        return recorded

    def score(self, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
        """Score every prompt. Return an empty list on a rank without logits."""
        scores: list[Scores] = []
        target, kept = device(), options.kept_of(len(prompts))
        for start in range(0, len(prompts), options.batch_size):
            batch = prompts[start : start + options.batch_size]
            lengths = [len(prompt) for prompt in batch]
            if options.packed:
                tokens = torch.tensor([[token for prompt in batch for token in prompt]], device=target)
                spans = [(0, sum(lengths[:i]), n) for i, n in enumerate(lengths)]
            else:
                tokens = torch.tensor(
                    [prompt + [0] * (max(lengths) - len(prompt)) for prompt in batch], device=target
                )
                spans = [(i, 0, n) for i, n in enumerate(lengths)]
            with torch.no_grad(), self._recording(options.routing, tokens.shape) as recorded:
                logits = self.logits(tokens, lengths if options.packed else None, options.positions)
            routed = self.gather_choices(recorded) if options.routing else {}
            if logits is None:
                continue
            for (row, at, n), prompt in zip(spans, batch, strict=True):
                choices = _choices_at(routed, row, at, n - 1)
                scores.append(_scores(logits[row, at : at + n - 1], prompt, kept[len(scores)], choices))
        return scores

    @contextmanager
    def _recording(self, wanted: bool, shape: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Record what the routers choose while the context is open, by layer."""
        recorded: dict[int, Any] = {}

        def record(layer: int, *forward: Any) -> None:
            recorded[layer] = tuple(t.view(*shape, -1).cpu() for t in self.choices(*forward))

        with hooked(self.routers() if wanted else {}, record):
            yield recorded


@contextmanager
def hooked(
    modules: Mapping[Name, torch.nn.Module], call: Callable[[Name, Any, Any, Any], None]
) -> Iterator[None]:
    """Call ``call(name, module, inputs, output)`` after every forward of the modules while the
    context is open."""
    handles = [module.register_forward_hook(partial(call, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choices_at(recorded: Mapping[int, Any], row: int, at: int, count: int) -> Choices | None:
    if not recorded:
        return None
    layers = sorted(recorded)
    experts, scores = (
        np.stack([recorded[layer][i][row, at : at + count].numpy() for layer in layers], 1) for i in (0, 1)
    )
    return Choices(tuple(layers), np.sort(experts, -1), scores)


def _scores(logits: torch.Tensor, prompt: Prompt, keep: int, choices: Choices | None) -> Scores:
    logprobs = torch.log_softmax(logits.float(), -1)
    following = torch.tensor(prompt[1:], device=logits.device)
    chosen = logprobs.gather(1, following[:, None])[:, 0]
    kept = logprobs[:keep].cpu().numpy() if keep else None
    return Scores(chosen.double().cpu().numpy(), logprobs.argmax(-1).cpu().numpy(), kept, choices)


def scores_of(system: System, prompts: Sequence[Prompt], options: ScoringOptions) -> list[Scores]:
    """Score prompts with a system and return the scores on every rank. A ReshardError on one rank
    is raised on all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return system.score(prompts, options)
    result: list[Scores] | ReshardError = []
    if system.spread or dist.get_rank() == 0:
        try:
            result = system.score(prompts, options)
        except ReshardError as error:
            result = error
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    for entry in gathered:
        if isinstance(entry, ReshardError):
            raise entry
    return next(scores for scores in gathered if scores)
