"""Layers that vLLM loads from checkpoints in fp8 blocks of 128x128, and then arranges for a kernel: a refit makes codes
and scales of plain weights, and vLLM's own processing arranges them.

Layers whose kernels read blocks as they are loaded need none of this: the copy itself makes them
(`reshard.refit.fp8_blocks`).
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.quantized.recipes import (
    Held,
    LayerQuantizer,
    parameter_like,
    refuse_parts_of_blocks,
)
from reshard.quantization.fp8_blocks import BLOCK, SCALE_SUFFIX
from reshard.refit.codecs import block_codec
from reshard.refit.codecs.places import PLACES
from reshard.refit.copying.tables import CODEC, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.refit.fp8_blocks.items import BlockTable, items_of


class Fp8BlockQuantizer(LayerQuantizer):
    """Makes a layer's codes and scales of blocks of plain weights, as a checkpoint in fp8 has them."""

    def find_matrices(self) -> None:
        for key in self.how.weights:
            codes, scales = self.templates[key], self.templates.get(key + SCALE_SUFFIX)
            shape = (*codes.shape[:-2], *(-(-length // BLOCK) for length in codes.shape[-2:]))
            known = codes.dtype == torch.float8_e4m3fn and scales is not None
            if not known or scales is None or (*scales.shape, scales.dtype) != (*shape, torch.float32):
                raise ReshardError(
                    f"vLLM keeps the scales of {self.name}.{key} in another way than is known to a refit: serve in bf16"
                )

    @property
    def encoded_names(self) -> set[str]:
        return {name for key in self.how.weights for name in (key, key + SCALE_SUFFIX)}

    def find_split_matrices(self, held: Sequence[Held]) -> None:
        for key in self.how.weights:
            parts = [part for part in held if part.parameter == key]
            rows = int(self.templates[key].shape[-2])
            refuse_parts_of_blocks(f"{self.name}.{key}", (BLOCK, BLOCK), rows, parts)

    def largest_magnitudes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the largest magnitude of each matrix: each block is whole on its rank and is measured when it is
        encoded, but numbers that are not finite have to be seen."""
        return {key: values[key].abs().amax().float().view(1) for key in self.how.weights}

    def encode(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        parameters = {}
        for key in self.how.weights:
            for name, made in zip((key, key + SCALE_SUFFIX), encode_matrices(values[key]), strict=True):
                parameters[name] = parameter_like(made, self.templates[name])
        return parameters


def encode_matrices(values: torch.Tensor, rounding: str = "fp32") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes of bf16 matrices ``[..., rows, columns]``, and the fp32 scales ``[..., rows / 128,
    columns / 128]`` of their blocks, as a refit makes them; on a GPU, enqueue it on the current stream."""
    *several, rows, columns = values.shape
    count, device = prod(several), values.device
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=device)
    scales = torch.empty((*several, down, across), dtype=torch.float32, device=device)
    numbers, codec = np.arange(count), block_codec(rounding)
    table, places, into = (
        empty_table(count),
        np.zeros((count, PLACES), np.int64),
        np.zeros((count, 3), np.int64),
    )
    table[:, SRC] = values.data_ptr() + numbers * rows * columns * values.element_size()
    table[:, ROWS], table[:, WIDTH], table[:, CODEC] = rows, columns, codec
    table[:, SRC_PITCH] = columns * values.element_size()
    places[:] = 0, 0, columns, across, rows, columns, codec
    places[:, 0] = codes.data_ptr() + numbers * rows * columns
    places[:, 1] = scales.data_ptr() + numbers * down * across * scales.element_size()
    into[:, 0] = numbers
    strips = items_of(table, into, np.zeros(count, np.int64), places)
    BlockTable(strips, device, np.arange(len(strips.items))).run()
    return codes.view(torch.float8_e4m3fn), scales
