"""What no run of a comparison looked at: tensors of the checkpoints that the logprobs of its prompts cannot show.

In transformers the parameters that a prompt uses are watched. MTP layers and towers are beside every system's forward
of text, and an expert that no token chose computed nothing.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from reshard.core.errors import ReshardError, first_line
from reshard.core.views import tensor_of
from reshard.engines.tracing.canonical import mtp_names
from reshard.parity.comparison import SystemComparison
from reshard.parity.metrics import Scores
from reshard.parity.served import checkpoint_of
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.opening import open_source

_EXPERT = re.compile(r"\.layers\.(\d+)\..*\.experts\.(\d+)\.")


def not_looked_at(comparison: SystemComparison) -> list[str]:
    """Return the published names of the tensors that no run of a comparison looked at, of those in its checkpoints.
    Where one cannot be listed, a note of the comparison says so."""
    held: dict[str, None] = {}
    for side, spec in comparison.specs.items():
        try:
            if isinstance(spec, str):
                held |= dict.fromkeys(_names_in(checkpoint_of(spec), comparison.options.hf_config))
        except ReshardError as error:
            comparison.notes.append(
                f"which tensors of {side} no run looked at is not known: {first_line(error)}"
            )
    model, unused = comparison.models[0], comparison.unused
    places, beside = model.places_in_memory(), {*mtp_names(model)}
    chosen = _chosen_experts(comparison.runs.values())

    def is_unseen(name: str) -> bool:
        if name in beside or model.is_of_tower(name):
            return True
        place = tensor_of(places.get(name, model.family.name_in_memory(name)))
        if place in unused or model.published_name(place) in unused:
            return True
        expert = _EXPERT.search(name)
        if expert is None:
            return False
        layer, index = map(int, expert.groups())
        return layer in chosen and index not in chosen[layer]

    return [name for name in held if is_unseen(name)]


def _names_in(path: str, hf_config: Path | None) -> list[str]:
    with closing(open_source(local_directory(path), hf_config)) as source:
        return [name for name in source.tensors if name not in source.copies]


def _chosen_experts(runs: Iterable[Sequence[Scores]]) -> dict[int, set[int]]:
    """Return the experts that some token of a prompt went to in some run, by layer, as far as runs tell them."""
    chosen: dict[int, set[int]] = {}
    for scores in (scores for run in runs for scores in run):
        if scores.choices is not None:
            for index, layer in enumerate(scores.choices.layers):
                chosen.setdefault(layer, set()).update(scores.choices.experts[:, index].reshape(-1).tolist())
    return chosen
