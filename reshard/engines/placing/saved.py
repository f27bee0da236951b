"""A model of a table some of whose tensors no trainer of transformers' class holds as the table has them: gpt-oss,
whose experts that class keeps as files do, transposed. From such a trainer an engine takes what the class saves."""

from collections.abc import Set
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError, listed
from reshard.engines.tracing.canonical import canonical_tensors, stored_tensors
from reshard.models.model import Model
from reshard.models.without_table import as_saved


class SavedForm(NamedTuple):
    """The `model` as its class saves it, the `names` of tensors that only this form has, and those that `others`, by
    the table, have in their place."""

    model: Model
    names: frozenset[str]
    others: frozenset[str]

    def is_among(self, available: Set[str]) -> bool:
        """Tell whether a trainer that has the `available` tensors has the model in this form. Raises ReshardError if it
        has parts of both, or a part of this form alone."""
        found = self.names & available
        missing = sorted(self.names - found)
        if found and (missing or self.others & available):
            raise ReshardError(
                f"the trainer has some experts as transformers' class saves them, and not "
                f"{listed(missing or sorted(self.others & available), 3)}: give all its ranks the same model"
            )
        return bool(found)


def saved_form(model: Model, dtype: torch.dtype) -> SavedForm | None:
    """Return the form in which transformers' class saves a model of a table; None if that has the same tensors, and if
    nothing says what the class saves."""
    if not model.family.has_megatron_names or model.family.experts_apart:
        return None
    try:
        saved = as_saved(model)
    except ReshardError:
        return None
    if stored_tensors(saved, dtype) != stored_tensors(model, dtype):
        return None
    names, others = (frozenset(canonical_tensors(one, dtype)) for one in (saved, model))
    return SavedForm(saved, names - others, others - names)
