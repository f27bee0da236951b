"""Let indexers choose given tokens to attend to: what is left of a difference then is not one of indexing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from reshard.core.errors import ReshardError, listed
from reshard.models.model import Model
from reshard.parity.causes.replay import TOPK, entered
from reshard.parity.prompts import Prompt
from reshard.parity.systems.base import ForwardSystem, System
from reshard.parity.systems.processes import gather_from_ranks


def leave_tokens_out(models: Sequence[Model], prompts: Sequence[Prompt]) -> bool:
    """Return True if the models have indexers, and the last token but one of the longest prompt, which predicts the
    last, has more tokens to attend to than an indexer chooses."""
    if not all(model.config.get("index_topk") for model in models):
        return False
    return max(map(len, prompts)) - 1 > min(int(model.config["index_topk"]) for model in models)


class AttendedTokens:
    """The tokens that the indexers of a system let the tokens of each prompt attend to.

    Of an early token, which has fewer before it than its indexer chooses, ``topk`` gives later ones too: these are
    left out."""

    def __init__(self) -> None:
        self.bits: dict[tuple[int, int], np.ndarray] = {}  # [n, n / 8] by prompt and layer

    @contextmanager
    def recorded(self, system: System, prompt: int) -> Iterator[None]:
        """Record what indexers choose while the context is open, in which one prompt runs alone. Raises ReshardError
        if there is no indexer, or one does not choose by ``topk``."""
        assert isinstance(system, ForwardSystem)
        indexers = system.indexers()
        if not indexers:
            raise ReshardError(f"{system.name} has no indexers to ask")
        modes = {layer: _Recorded() for layer in indexers}
        with entered(indexers, modes):
            yield
        _check_used(modes)
        for layer, mode in modes.items():
            self.bits[prompt, layer] = np.packbits(mode.tokens.cpu().numpy(), axis=-1)

    def gather(self) -> None:
        """Add what other ranks have recorded. Every rank calls this."""
        self.bits = gather_from_ranks(self.bits)

    @contextmanager
    def replayed(self, system: System, prompt: int) -> Iterator[None]:
        """Let the indexers of a system choose what was recorded while the context is open, in which one prompt runs
        alone. Raises ReshardError if nothing was recorded in a layer, or its indexer does not choose by ``topk``."""
        assert isinstance(system, ForwardSystem)
        indexers = system.indexers()
        missing = [layer for layer in indexers if (prompt, layer) not in self.bits]
        if missing:
            raise ReshardError(f"B has no indexers in layers {listed(map(str, missing), 3)}")
        modes = {layer: _Replayed(self._tokens(prompt, layer)) for layer in indexers}
        with entered(indexers, modes):
            yield
        _check_used(modes)

    def _tokens(self, prompt: int, layer: int) -> torch.Tensor:
        bits = self.bits[prompt, layer]
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=len(bits)).astype(bool))


def _check_used(modes: Mapping[int, "_OfIndexer"]) -> None:
    unused = [layer for layer, mode in modes.items() if not mode.used]
    if unused:
        raise ReshardError(
            f"the indexers of layers {listed(map(str, unused), 3)} do not choose by torch.topk"
        )


class _OfIndexer(TorchFunctionMode):
    """Changes or records what ``topk`` gives of scores ``[1, n, n]``, of each token for each."""

    used = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in TOPK or args[0].shape != (1, args[0].shape[-1], args[0].shape[-1]):
            return result
        self.used = True
        return self.of(args[0], result)

    def of(self, scores: torch.Tensor, best: Any) -> Any:
        """Return what is to stand in the place of the `best` ``(values, indices)``."""
        raise NotImplementedError


class _Recorded(_OfIndexer):
    """Keeps `tokens` ``[n, n]``: True where one attends to the other."""

    tokens: torch.Tensor

    def of(self, scores: torch.Tensor, best: Any) -> Any:
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best[1], True)
        self.tokens = chosen[0].tril()
        return best


class _Replayed(_OfIndexer):
    """Gives these `tokens` ``[n, n]``, best first. A row with fewer than others repeats its best, with a value of
    -inf, so that neither a mask nor a list has anything more."""

    def __init__(self, tokens: torch.Tensor) -> None:
        super().__init__()
        self.tokens = tokens

    def of(self, scores: torch.Tensor, best: Any) -> Any:
        others, count = ~self.tokens.to(scores.device), int(self.tokens.sum(-1).max())
        values, indices = scores.masked_fill(others, -torch.inf).sort(dim=-1, descending=True)
        indices = indices.where(values > -torch.inf, indices[..., :1])
        return type(best)((values[..., :count], indices[..., :count]))
