"""What a training checkpoint holds besides weights, as far as comparisons and checks look at it."""

from math import prod

import numpy as np

from reshard.megatron.checkpoint import NOT_WEIGHTS
from reshard.megatron.parameters import PADDING
from reshard.megatron.training.states import STATE, OptimizerStates, states_of
from reshard.storage.io.files import OpenFiles
from reshard.storage.sources.base import Source
from reshard.storage.sources.megatron import MegatronSource


def has_states(source: Source) -> bool:
    """Return True if a source's optimizer states are among its tensors."""
    return isinstance(source, MegatronSource) and source.states is not None


def is_padding(name: str) -> bool:
    """Return True for the padding of the vocabulary, of a weight or of its states."""
    return name.startswith(PADDING) or f".{PADDING}" in name


def is_of_training(name: str) -> bool:
    """Return True for a tensor that a source has only with its optimizer states."""
    return name.startswith(STATE) or is_padding(name)


def notices_on_training(left: Source, right: Source) -> list[str]:
    """Return sentences on what a comparison of two sources leaves out of what their trainings have saved."""
    of_sides = [_all_states(left), _all_states(right)]
    places = [str(left.path), str(right.path)]
    if of_sides == [None, None]:
        return []
    if None in of_sides:
        with_states = of_sides.index(None) ^ 1
        return [
            (
                f"{places[with_states]} has optimizer states, and {places[1 - with_states]} none: only weights "
                "were compared"
            )
        ]
    fixed = [
        (place, states)
        for place, states in zip(places, of_sides, strict=True)
        if states and not states.can_move
    ]
    if fixed:
        place, states = fixed[0]
        return [
            f"optimizer states were not compared: {place} has them in the format {states.format}, {states.obstacle}"
        ]
    unplaced = [
        source.unplaced_states
        for source in (left, right)
        if isinstance(source, MegatronSource) and source.unplaced_states is not None
    ]
    if unplaced:
        return [f"optimizer states were not compared: {unplaced[0]}"]
    notices = ["not compared: what else the trainings have in common.pt (schedules, arguments)"]
    if any(_has_rng(source) for source in (left, right)):
        notices[0] += ", and states of RNGs"
    padding = [{n: s.tensors[n].shape for n in s.tensors if is_padding(n)} for s in (left, right)]
    if padding[0] != padding[1]:
        notices.append(
            "padding of the vocabulary was not compared: the layouts have different numbers of rows"
        )
    return notices


def damaged_padding(source: Source) -> list[str]:
    """Return the keys of a Megatron checkpoint whose rows of padding are not the zeros that were written: none
    publishes them, but Megatron loads them, and its loss sees them."""
    if not isinstance(source, MegatronSource):
        return []
    damaged = set()
    with OpenFiles() as files:
        for (key, offsets, sizes, before), local in source.plan.src.tensors.items():
            stored = source.keys.get(key) or source.checkpoint.keys[key]
            for box in local.fills:
                chunk = stored.chunks[offsets, sizes]
                tensor = source.containers.tensor_at(chunk)
                width = prod(local.shape[1:]) * tensor.dtype.size
                start = tensor.offset + before * tensor.dtype.size + box.offsets[0] * width
                data = files.read(source.checkpoint.directory / chunk.file, start, box.lengths[0] * width)
                if np.frombuffer(data, np.uint8).any():
                    damaged.add(key)
    return sorted(damaged)


def _all_states(source: Source) -> OptimizerStates | None:
    return states_of(source.checkpoint) if isinstance(source, MegatronSource) else None


def _has_rng(source: Source) -> bool:
    return isinstance(source, MegatronSource) and any(
        key.startswith(NOT_WEIGHTS["RNG state"]) for key in source.checkpoint.objects
    )
