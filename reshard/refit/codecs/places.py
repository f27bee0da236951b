"""Places of what an engine serves in blocks: where the codes and scales of its local tensors lie, and their shapes."""

import numpy as np

from reshard.refit.codecs import IN_BLOCKS, block_codec
from reshard.refit.copying.addresses import (
    DESTINATION,
    DESTINATION_SHAPE,
    REQUEST_CODEC,
    REQUEST_COLUMNS,
    region_addresses,
)
from reshard.refit.engine import Engine

# Columns of `places_of`: the addresses of codes and scales, their pitches in elements, rows and
# columns, and the codec that bf16 would have.
PLACES = 7
PLACE, PITCH, SHAPE, ENCODING = slice(0, 2), slice(2, 4), slice(4, 6), 6


def places_of(engine: Engine) -> np.ndarray:
    """Return where the engine's quantized local tensors lie now, by their index among its regions,
    as columns `PLACES`; zeros for the others."""
    matrix = np.zeros((len(engine.regions), PLACES), np.int64)
    indices = [index for index, identity in enumerate(engine.regions) if identity in engine.scales]
    quantized = [identity for identity in engine.regions if identity in engine.scales]
    if not quantized:
        return matrix
    codes = region_addresses(engine.regions[identity] for identity in quantized)
    scales = region_addresses(engine.scales[identity].region for identity in quantized)
    matrix[indices, PLACE] = np.stack([codes[:, 0], scales[:, 0]], 1)
    matrix[indices, PITCH] = np.stack([codes[:, 1], scales[:, 1]], 1)
    matrix[indices, SHAPE] = [engine.placement.tensors[identity].shape for identity in quantized]
    matrix[indices, ENCODING] = [block_codec(engine.scales[identity].rounding) for identity in quantized]
    return matrix


def places_of_requests(requests: np.ndarray) -> np.ndarray:
    """Return an engine's local tensors as a trainer's rank knows them of these requests (`addresses.Pieces`): the
    shapes and codecs of those that it serves in blocks, as columns `PLACES`."""
    if requests.shape[1] == REQUEST_COLUMNS:
        return np.zeros((0, PLACES), np.int64)
    blocks = requests[IN_BLOCKS[requests[:, REQUEST_CODEC]]]
    tensors = blocks[:, DESTINATION.start]
    places = np.zeros((int(tensors.max(initial=-1)) + 1, PLACES), np.int64)
    places[tensors, SHAPE], places[tensors, ENCODING] = blocks[:, DESTINATION_SHAPE], blocks[:, REQUEST_CODEC]
    return places
