"""Weights in the format of ``compressed-tensors``: fp8 (e4m3) or int8, with a scale for each row, an output channel, or for
all of a matrix, as llm-compressor publishes them for vLLM.

The arithmetic is that of ``calculate_qparams`` and ``quantize`` of compressed-tensors 0.17: in the weights' own dtype, whose
numbers each step rounds to.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.disk.quantised import Quantised, Reader, check_finite
from reshard.disk.streams import SLAB_BYTES, StripWriter, TensorInfo

SUFFIX = "_scale"
METHOD = "compressed-tensors"
# Least and largest number that is coded, and what the largest magnitude is divided by.
RANGES = {"float8_e4m3fn": (-448.0, 448.0, 448.0), "int8": (-128.0, 127.0, 127.5)}
TYPES = {"float8_e4m3fn": "float", "int8": "int"}


class Scheme(NamedTuple):
    """The dtype of codes, and whether a scale is for a ``channel`` of the output or for a whole ``tensor``."""

    codes: Dtype
    strategy: str


def quantize(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows, or of a whole matrix, ``[rows, columns]``; and the scales in its dtype, ``[rows, 1]`` or ``[1]``."""
    largest = np.abs(weight.astype(np.float32)).max(
        1 if scheme.strategy == "channel" else None, keepdims=True
    )
    scales = _scales(largest, scheme, weight.dtype)
    return _codes(weight, scales, scheme), scales if scheme.strategy == "channel" else scales.reshape(1)


def _scales(largest: np.ndarray, scheme: Scheme, dtype: np.dtype) -> np.ndarray:
    """The scales of magnitudes in fp32, in a dtype."""
    scales = (largest / np.float32(RANGES[scheme.codes.name][2])).astype(dtype)
    return np.where(scales == 0, ml_dtypes.finfo(dtype).eps, scales).astype(dtype)


def _codes(weight: np.ndarray, scales: np.ndarray, scheme: Scheme) -> np.ndarray:
    """What rows become by scales ``[rows, 1]`` or ``[1, 1]``."""
    least, most, _ = map(np.float32, RANGES[scheme.codes.name])
    wide = weight.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of infinities and NaN, which the scales tell of
        scaled = (wide / scales.astype(np.float32)).astype(weight.dtype).astype(np.float32)
        scaled = (scaled + np.float32(0)).clip(least, most)  # the zero point, which makes 0 of -0
        return (np.rint(scaled) if scheme.codes.name == "int8" else scaled).astype(scheme.codes.numpy())


class Channels(Quantised):
    """Weights that are stored so, with a scale for each output channel."""

    suffix, rows = SUFFIX, 1
    strategy, inputs = "channel", "token"

    def __init__(self, names: Iterable[str], codes: Dtype) -> None:
        super().__init__(names)
        self.scheme = Scheme(codes, self.strategy)

    def quantize(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return quantize(rows, self.scheme)

    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        return self.scheme.codes, info.dtype

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.rows, 1

    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """As llm-compressor writes it, with activations that are quantised by token, or as a whole, as they come."""
        kind = TYPES[self.scheme.codes.name]
        weights = {
            "num_bits": 8,
            "type": kind,
            "strategy": self.strategy,
            "symmetric": True,
            "dynamic": False,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": weights | {"strategy": self.inputs, "dynamic": True},
            "output_activations": None,
        }
        return {
            "config_groups": {"group_0": group},
            "format": f"{kind}-quantized",
            "ignore": [name for name in kept if not name.endswith("embed_tokens")],
            "quant_method": METHOD,
            "quantization_status": "compressed",
        }


class Tensors(Channels):
    """Weights that are stored with one scale each: they are read twice, the first time to find it."""

    strategy = inputs = "tensor"

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return (1,)

    def copy(
        self, name: str, info: TensorInfo, read: Reader, writer: StripWriter, look: Reader
    ) -> dict[str, str]:
        largest = np.zeros((1, 1), np.float32)
        for start, stop in info.slabs(SLAB_BYTES):
            # not Python's max, which may pass over NaN
            largest = np.maximum(largest, np.abs(look(start, stop).astype(np.float32)).max())
        scales = _scales(largest, self.scheme, info.dtype.numpy())
        check_finite(name, scales, "; drop --quantize")
        digest = xxhash.xxh3_128()
        for start, stop in info.slabs(SLAB_BYTES):
            codes = _codes(read(start, stop), scales, self.scheme)
            digest.update(memoryview(codes.view(np.uint8).reshape(-1)))
            writer.write_rows(name, start, codes)
        writer.write_rows(name + self.suffix, 0, scales)
        return {name: digest.hexdigest(), name + self.suffix: xxhash.xxh3_128_hexdigest(scales.tobytes())}


def check_wanted(config: Mapping[str, Any], what: str) -> None:
    """Raise ReshardError where a ``quantization_config`` of this format wants what cannot be made of plain weights."""
    groups = config.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(g, Mapping) for g in groups.values())
    ):
        raise ReshardError(f"{what} wants weights quantised by {METHOD}, but has no config_groups")
    for name, group in groups.items():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        how = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric")}
        known = (
            how["num_bits"] == 8
            and how["type"] in TYPES.values()
            and how["strategy"] in ("channel", "tensor")
        )
        if not known or how["symmetric"] is False or not inputs:
            raise ReshardError(
                f"{what} wants weights of {name} quantised by {METHOD} as {how}, and of these reshard makes 8 bits "
                f"for each channel or tensor, symmetric, with activations in 8 bits too"
            )
        if not inputs.get("dynamic"):
            raise ReshardError(
                f"{what} wants activations of {name} quantised by scales that come with a checkpoint, which a Megatron "
                f"checkpoint has not: serve it with a config whose input_activations are dynamic"
            )
