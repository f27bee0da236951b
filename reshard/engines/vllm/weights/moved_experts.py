"""Experts that vLLM copies, and moves by their load (EPLB): where they are now.

vLLM moves them in its own step, with all ranks, and a call to a worker comes between two steps. What it moves in a
thread of its own (``use_async``), it copies into a buffer, a layer at a time, and takes over in its next step: where a
refit has written other weights meanwhile, `leave_where_they_are` sees to it that it takes over nothing.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.moved_experts import Held, MovedExperts, experts_in_places
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.vllm.compat import expert_moves, known, unknown
from reshard.engines.vllm.layers import Experts, copies_of_experts, experts_of
from reshard.engines.vllm.weights.served import Served
from reshard.models.model import Model

WAIT_SECONDS = 0.001
ROUTED = "routed_experts"  # the module of a layer that has the experts' matrices


class VllmExperts:
    """The layers of a model whose experts vLLM moves: their modules by the names of those that have the matrices, and
    what each has of them."""

    def __init__(self, served: Served, placed: PlacedTensors, model: Model, worker: Any) -> None:
        self.layers: dict[str, tuple[torch.nn.Module, Experts]] = {}
        for name, module in served.named_modules:
            experts = experts_of(getattr(module, ROUTED, None))
            if experts is not None and experts.balanced:
                self.layers[f"{name}.{ROUTED}"] = module, experts
        for name, module in served.named_modules:
            if module._parameters and moves_experts(module, inside=False) and name not in self.layers:
                raise unknown(f"keeps experts that it moves in {name}")
        if not self.layers:
            raise unknown("keeps experts that it moves elsewhere")
        self.model, self.worker = model, worker
        places = {
            name: range(experts.total) if experts.placed is None else experts.placed
            for name, (_, experts) in self.layers.items()
        }
        self.moved = MovedExperts("vLLM", placed, places, model)

    def held(self) -> Held:
        """Return the experts that are in the places of all ranks now; none before vLLM has a table of them, as for a
        model without a worker.

        Raises ReshardError if vLLM does not know.
        """
        tables: dict[str, torch.Tensor] = {}
        for name, (module, experts) in self.layers.items():
            table = copies_of_experts(module)
            if table is not None:
                tables[name] = table[:, : experts.total - self.model.num_experts + 1]
        if len(tables) < len(self.layers) and (tables or self.worker is not None):
            raise unknown("does not say where a layer's experts have moved as it did")
        if not tables:
            return {}
        copies = torch.stack([*tables.values()]).cpu().numpy()  # in one copy from the GPU
        return {
            name: experts_in_places("vLLM", name, of_layer, self.layers[name][1].total)
            for name, of_layer in zip(tables, copies, strict=True)
        }


def check_moves(served: Served, draft: torch.nn.Module | None, parallel: Any, worker: Any) -> None:
    """Raise ReshardError where a refit could not follow the experts that vLLM moves: those of a drafter that is not
    refitted, or in the background where nobody sees it."""
    if draft is not None and served.draft is None and moves_experts(draft):
        raise ReshardError(
            "vLLM moves the experts of a drafter by their load (EPLB), and the trainer has no MTP layers for it: "
            "start vLLM without the drafter, or without enable_eplb"
        )
    in_background = parallel.eplb_config.use_async
    if in_background and parallel.data_parallel_size > 1:
        raise ReshardError(
            "vLLM's data parallel engines move experts in the background (EPLB): one that a failed refit has not "
            "reached would take a move over that the others have given up. Start vLLM with --eplb-config "
            "'{\"use_async\": false}'"
        )
    if worker is None and in_background:
        raise ReshardError(
            "vLLM moves experts in the background (EPLB), which a model without its worker does not show: pass "
            "VllmModel the worker, or start vLLM with --eplb-config '{\"use_async\": false}'"
        )


def moves_experts(module: torch.nn.Module, inside: bool = True) -> bool:
    """Tell whether vLLM moves experts of a module, or of those `inside`."""
    modules = module.modules() if inside else [module]
    return any(experts.balanced for experts in map(experts_of, modules) if experts is not None)


def leave_where_they_are(worker: Any, seconds: float) -> None:
    """Have vLLM leave the experts of a layer that it has copied in the background where they are: what it has copied
    are weights that are about to be written. It moves those of the layers after it later, as they are then.

    All ranks of the engine call this before they write, between the same two steps, so that none of them moves what
    others leave. Raises ReshardError if a copy under way does not end within so many `seconds`.
    """
    for moves in expert_moves(worker):
        deadline = time.monotonic() + seconds
        while moves.rebalanced and moves.pending_result is None:  # the thread is copying, and will wait then
            if time.monotonic() > deadline:
                raise ReshardError(
                    f"vLLM copies experts in the background (EPLB), and was not done within {seconds:g} s: refit it "
                    f"again, or start it with --eplb-config '{{\"use_async\": false}}'"
                )
            time.sleep(WAIT_SECONDS)
        if moves.pending_result is not None:
            moves.pending_result = _moving_nothing(moves, moves.pending_result)


def _moving_nothing(moves: Any, copied: Any) -> Any:
    """Return what vLLM takes over of a layer when no expert of it moves."""
    with known("moves experts in the background in another way"):
        done = copied.transfer_metadata
        none = np.zeros_like(done.is_unchanged)
        masks = dict.fromkeys(("is_unchanged", "is_received_locally"), ~none)
        counts = {"recv_primary_mask": none, "recv_count": 0 * done.recv_count}
        unmoved = replace(done, **masks, **counts)
        where_they_are = moves.physical_to_logical_map[copied.layer_idx].cpu()
        return replace(copied, transfer_metadata=unmoved, new_physical_to_logical_map=where_they_are)
