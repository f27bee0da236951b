"""The drafter of an SGLang, a model of its own (``--speculative-algorithm EAGLE3``): refitted if the trainer trains it
too, and else left alone."""

from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.boxes import whole
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region, same_bits
from reshard.engines.live import owners_of
from reshard.engines.placing.accounts import LEFT_ALONE, Account
from reshard.engines.placing.drafter import place_drafter, stored_drafter, unchanged
from reshard.engines.placing.left_alone import DRAFT
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.sglang import compat
from reshard.engines.sglang.weights.names import SGLANG
from reshard.engines.sglang.weights.supported import PLAIN_METHODS
from reshard.engines.sglang.weights.traced import trace_model
from reshard.engines.tracing.trace import Trace
from reshard.models.drafters import DRAFTER
from reshard.refit.drafter import DeclaredDrafter

AS_LOADED = Account(LEFT_ALONE, "of the drafter, as it was loaded")


class Drafter:
    """The drafter of a `worker`, SGLang's ``EagleDraftWorker``; `main` are the tensors of the model, some of which it
    may share.

    `tensors` are its own parameters and buffers by name, `owners` the modules that hold them. Which of the model's
    tokens are its own SGLang keeps in the worker, made of what files call d2t: a refit writes that into `shifts`.
    """

    def __init__(self, worker: Any, main: Mapping[str, torch.Tensor]) -> None:
        self.worker, self.module = worker, compat.model_of_drafter(worker)
        shared = {id(tensor) for tensor in main.values()}
        named = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        own = {name: tensor for name, tensor in named.items() if id(tensor) not in shared}
        self.tensors = {DRAFT + name: tensor for name, tensor in own.items()}
        owners = owners_of(dict(self.module.named_modules()), own)
        self.owners = {DRAFT + name: owner for name, owner in owners.items()}
        self.shifts: torch.Tensor | None = None

    def served(self) -> dict[str, torch.Tensor]:
        """Return what it drafts by, by name: its own parameters, and which tokens they are for."""
        tokens = self.worker.hot_token_id
        own = {name: one for name, one in self.tensors.items() if self._is_saved(name)}
        return own if tokens is None else own | {f"{DRAFT}hot_token_id": tokens}

    def _is_saved(self, name: str) -> bool:
        module, key = self.owners[name]
        return key not in module._non_persistent_buffers_set

    def check_left_alone(self, arguments: Any) -> None:
        """Raise ReshardError if it holds dummy weights, which no refit brings."""
        if compat.draft_load_format(arguments) == "dummy":
            raise ReshardError(
                "this SGLang drafts tokens by dummy weights (load_format='dummy'), and the trainer has no drafter: "
                "load a checkpoint, or start it without --speculative-algorithm"
            )

    def place(self, declared: DeclaredDrafter, dtype: torch.dtype) -> PlacedTensors:
        """Return where a trainer's drafter goes, in SGLang's `dtype`. Raises ReshardError as `place_drafter` does, and
        for a drafter that SGLang quantizes."""
        for name, module in self.module.named_modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method not in ("NoneType", *PLAIN_METHODS):
                raise ReshardError(
                    f"{DRAFT}{name} serves from weights that SGLang's {method} has changed, which a refit cannot "
                    f"write: serve the drafter in bf16, or give the trainer's model without it"
                )
        tokens = [name for name in declared.tensors if "d2t" in name]
        weights = {name: one for name, one in declared.tensors.items() if name not in tokens}
        own = declared._replace(tensors=weights)
        with unchanged(self.module):
            trace = trace_model(self.module, stored_drafter(own), dtype)
        renamed = Trace(
            [copy._replace(parameter=DRAFT + copy.parameter) for copy in trace.copies],
            [fill._replace(parameter=DRAFT + fill.parameter) for fill in trace.fills],
        )
        saved = {name: one for name, one in self.tensors.items() if self._is_saved(name)}
        placed = place_drafter(SGLANG.engine, self.module, own, renamed, saved)
        return placed.joined(self._place_tokens(declared, tokens))

    def _place_tokens(self, declared: DeclaredDrafter, names: list[str]) -> PlacedTensors:
        """Return where the shifts of its tokens go."""
        tokens = self.worker.hot_token_id
        shapes = [declared.tensors[name] for name in names]
        expected = [] if tokens is None else [(tuple(tokens.shape), "int64")]
        if shapes != expected:
            raise ReshardError(
                f"the trainer's drafter has {shapes or 'no'} d2t, and this SGLang's {expected or 'none'}: start it "
                f"with a checkpoint of the drafter that has as many tokens"
            )
        if tokens is None:
            return PlacedTensors(Placement({}), {})
        [name] = names
        self.shifts = tokens - torch.arange(len(tokens), device=tokens.device)
        box, identity = whole(tuple(tokens.shape)), (f"{DRAFT}hot_token_id", 0, name)
        local = LocalTensor(identity, box.lengths, (Part(DRAFTER + name, box, (0,)),))
        region = Region(self.shifts, 0, 1)
        return PlacedTensors(Placement.of({DRAFTER + name: box.lengths}, [local]), {identity: region})

    def tokens(self) -> dict[str, torch.Tensor]:
        """Return which tokens are its own, by name, and the shifts that these are made of; nothing without any."""
        if self.shifts is None:
            return {}
        return {f"{DRAFT}hot_token_id": self.worker.hot_token_id, f"{DRAFT}shifts": self.shifts}

    def update(self) -> None:
        """Write which tokens are its own, where they are: CUDA graphs hold the address."""
        if self.shifts is not None:
            self.worker.hot_token_id.copy_(self._tokens())

    def stale(self) -> list[str]:
        """Return the name of what does not follow from the shifts that it has."""
        if self.shifts is None or same_bits(self.worker.hot_token_id, self._tokens()):
            return []
        return [f"{DRAFT}hot_token_id"]

    def _tokens(self) -> torch.Tensor:
        assert self.shifts is not None
        return self.shifts + torch.arange(len(self.shifts), device=self.shifts.device)
