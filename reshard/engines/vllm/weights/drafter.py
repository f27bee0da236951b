"""The drafter, vLLM's model that drafts tokens for another: one made of the model's own MTP layers
is refitted with it, and one that is a model of its own if the trainer trains that too."""

from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.core.views import tensor_of
from reshard.engines.layout import outer_rows
from reshard.engines.placing.accounts import LEFT_ALONE, Account
from reshard.engines.placing.drafter import place_drafter, shared_error, stored_drafter, unchanged
from reshard.engines.placing.left_alone import DRAFT
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.tracing.canonical import mtp_names
from reshard.engines.tracing.trace import Trace
from reshard.engines.tracing.views import StoredViews
from reshard.engines.vllm.compat import draft_load_format
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.quantized.layers import instead_of, is_processed_again, kernel_of
from reshard.engines.vllm.weights.served import Served
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.models.model import Model
from reshard.refit.drafter import DeclaredDrafter

# vLLM's parameter of what files call d2t: how far each token of the drafter is from the model's.
TOKEN_SHIFTS = "draft_id_to_target_id"
NO_SHIFTS = Account(LEFT_ALONE, "zeros: the drafter's tokens are the model's, as the trainer's are")


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
    trace = _as_served(trace_model(draft, StoredViews(shapes).with_dtypes(dtypes)), draft, tensors)
    copies = dict.fromkeys(copy._replace(name=original_of[copy.name]) for copy in trace.copies)
    return Trace(
        [copy for copy in copies if copy.parameter.startswith(DRAFT)],
        [fill for fill in trace.fills if fill.parameter.startswith(DRAFT)],
    )


def _as_served(trace: Trace, draft: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Trace:
    """Return the trace of a drafter's loader with the names that its parameters have among `tensors`, those of model
    and drafter."""
    live = dict([*draft.named_parameters(), *draft.named_buffers()])
    names = {id(tensor): name for name, tensor in tensors.items()}

    def served_name(parameter: str) -> str:
        return names.get(id(live.get(parameter)), DRAFT + parameter)

    return Trace(
        [copy._replace(parameter=served_name(copy.parameter)) for copy in trace.copies],
        [fill._replace(parameter=served_name(fill.parameter)) for fill in trace.fills],
    )


def own_parameters(served: Served) -> dict[str, torch.Tensor]:
    """Return the drafter's own parameters by name, without those that it shares with the model."""
    parameters = {id(one) for module in served.modules() for one in module._parameters.values()}
    return {
        name: tensor
        for name, tensor in served.named_tensors()
        if name.startswith(DRAFT) and id(tensor) in parameters
    }


def without_shifts(own: Mapping[str, torch.Tensor], declared: DeclaredDrafter | None) -> dict[str, Account]:
    """Return the account of the shifts of a drafter's tokens, if there are none: the trainer declares no d2t, and those
    that vLLM has are zeros."""
    shifts = own.get(DRAFT + TOKEN_SHIFTS)
    lacking = declared is not None and not any("d2t" in name for name in declared.tensors)
    return {DRAFT + TOKEN_SHIFTS: NO_SHIFTS} if lacking and shifts is not None and not shifts.any() else {}


def place_separate(
    draft: torch.nn.Module, declared: DeclaredDrafter, served: Served, tensors: Mapping[str, torch.Tensor]
) -> PlacedTensors:
    """Return the tensors of a drafter that is a model of its own; `tensors` are those of model and drafter by name.

    Raises ReshardError as `place_drafter` does, and for a drafter that vLLM quantizes.
    """
    for name, module in served.named_modules:
        if name.startswith(DRAFT) and (method := loading_method(module)):
            raise ReshardError(
                f"{name} serves from weights that vLLM's {method} has changed, which a refit cannot write: serve the "
                f"drafter in bf16, or give the trainer's model without it"
            )
        if name.startswith(DRAFT) and is_processed_again(module):
            raise ReshardError(
                f"vLLM arranges {name} for {kernel_of(module)} after loading, which a refit of a drafter does not "
                f"follow: {instead_of(module)}, or give the trainer's model without it"
            )
    own = own_parameters(served)
    held = {id(one) for one in own.values()}
    shared = [f".{name}" for name, one in draft.named_parameters() if id(one) not in held]
    names = sorted(name for name in declared.tensors if any(each.endswith(f".{name}") for each in shared))
    if names:  # perhaps of another shape, which the loader would refuse without saying why
        raise shared_error("vLLM", names)
    with unchanged(draft):
        trace = _as_served(trace_model(draft, stored_drafter(declared)), draft, tensors)
    left = without_shifts(own, declared)
    return place_drafter(
        "vLLM", draft, declared, trace, {name: one for name, one in own.items() if name not in left}
    )
