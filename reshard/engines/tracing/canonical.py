"""The published tensors of a model: their names, shapes and dtypes, whole as an engine's loader
takes them, and in canonical parts."""

from collections.abc import Iterator

import torch

from reshard.engines.layout import WITHOUT_PARAMETER, published_tensors
from reshard.engines.placing.names import EngineNames
from reshard.engines.tracing.deduplicated import ExpertLayer
from reshard.engines.tracing.trace import Canonical
from reshard.engines.tracing.views import StoredViews
from reshard.megatron.parameters import expand
from reshard.models.model import Model


def stored_tensors(model: Model, dtype: torch.dtype) -> Canonical:
    """Return shape and dtype of every tensor that a file of the main model would have, as an engine's
    loader takes them: canonical ones may be views of these. Experts are each on their own, unless no
    file has them so."""
    canonical = canonical_tensors(model, dtype)
    views = stored_views(model, canonical)
    return views.with_dtypes({name: dtype for name, (_, dtype) in canonical.items()})


def stored_views(model: Model, canonical: Canonical) -> StoredViews:
    """Return how canonical tensors lie in those that an engine's loader takes."""
    packed = {} if model.family.experts_apart else expand(model).packed
    return StoredViews({name: shape for name, (shape, _) in canonical.items()}, packed)


def canonical_tensors(model: Model, dtype: torch.dtype, mtp: bool = False) -> Canonical:
    """Return shape and dtype of every published tensor by name; those of MTP layers, which an
    engine's main model lacks, with `mtp`."""
    return {
        name: (model.shape(row.shape), torch.float32 if row.fp32 else dtype)
        for row, name in published_tensors(model, mtp)
    }


def mtp_names(model: Model) -> Iterator[str]:
    """Yield the published names of the tensors of MTP layers."""
    for block in model.blocks():
        for row in block.rows if block.mtp else ():
            if row.arrangement not in WITHOUT_PARAMETER:
                for _, name in row.names(block.published, range(model.num_experts)):
                    yield name


def expert_layers(names: EngineNames, model: Model) -> list[ExpertLayer]:
    """Return the layers with routed experts that files have each on its own, without MTP layers."""
    layers: list[ExpertLayer] = []
    for block in model.blocks() if model.family.experts_apart else ():
        rows = [row for row in block.rows if row.of_experts and row.arrangement not in WITHOUT_PARAMETER]
        if not rows or block.mtp:
            continue
        by_expert: dict[int, list[str]] = {}
        for row in rows:
            for expert, name in row.names(block.published, range(model.num_experts)):
                by_expert.setdefault(expert, []).append(name)  # type: ignore[arg-type]
        layers.append(ExpertLayer(block.published, names.prefixed(model, block.published), by_expert))
    return layers
