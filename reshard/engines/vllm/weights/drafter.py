"""The drafter, vLLM's model that drafts tokens for another: one made of the model's own MTP layers
is refitted with it."""

from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.core.views import tensor_of
from reshard.engines.layout import outer_rows
from reshard.engines.tracing.canonical import mtp_names
from reshard.engines.tracing.trace import Trace
from reshard.engines.tracing.views import StoredViews
from reshard.engines.vllm.compat import draft_load_format
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.weights.served import DRAFT
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.models.model import Model


def is_mtp(draft: torch.nn.Module | None, model: Model) -> bool:
    """Tell whether a drafter is made of the model's own MTP layers."""
    if draft is None:
        return False
    parameters = {name for name, _ in draft.named_parameters()}
    return any(VLLM.prefixed(model, name) in parameters for name in mtp_names(model))


def check_drafter(draft: torch.nn.Module | None, config: Any, why: str) -> None:
    """Raise ReshardError if a drafter that no refit brings holds dummy weights; `why` says why no
    refit brings it."""
    if draft is not None and draft_load_format(config) == "dummy":
        raise ReshardError(
            f"this vLLM drafts tokens by dummy weights (load_format='dummy'), and {why}: load a checkpoint, "
            f"or serve without speculative_config"
        )


def trace_drafter(
    draft: torch.nn.Module, model: Model, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]
) -> Trace:
    """Return what vLLM's loader writes into the drafter's own tensors, from tensors that a trainer
    has.

    MTP layers have copies of embedding and output, which are traced back to the originals.
    `tensors` are those of model and drafter by name; what the drafter shares with the model is left
    out.
    """
    originals = {row.megatron: row.hf for row in outer_rows(model)}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    original_of: dict[str, str] = {}
    for block in model.blocks():
        for row in block.rows if block.mtp or block.layer is None else ():
            if row.arrangement == "ignored":
                continue
            for _, name in row.names(block.published, range(model.num_experts)):
                shapes[name] = model.shape(row.shape)
                dtypes[name] = torch.float32 if row.fp32 else dtype
                original = originals[row.megatron] if row.arrangement == "copy" else name
                original_of[tensor_of(name)] = tensor_of(original)
    trace = trace_model(draft, StoredViews(shapes).with_dtypes(dtypes))
    live = dict([*draft.named_parameters(), *draft.named_buffers()])
    names = {id(tensor): name for name, tensor in tensors.items()}

    def served_name(parameter: str) -> str:
        return names.get(id(live.get(parameter)), DRAFT + parameter)

    copies = dict.fromkeys(
        copy._replace(parameter=served_name(copy.parameter), name=original_of[copy.name])
        for copy in trace.copies
    )
    fills = [fill._replace(parameter=served_name(fill.parameter)) for fill in trace.fills]
    return Trace(
        [copy for copy in copies if copy.parameter.startswith(DRAFT)],
        [fill for fill in fills if fill.parameter.startswith(DRAFT)],
    )
