"""Weights in the format of ``compressed-tensors``: fp8 (e4m3) or int8, with a scale for each row, an output channel, or for
all of a matrix, as llm-compressor publishes them for vLLM.

The arithmetic is that of ``calculate_qparams`` and ``quantize`` of compressed-tensors 0.17: in the weights' own dtype, whose
numbers each step rounds to.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.disk.quantised import Quantised
from reshard.disk.streams import TensorInfo

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
    least, most, divisor = map(np.float32, RANGES[scheme.codes.name])
    wide = weight.astype(np.float32)
    largest = np.abs(wide).max(1 if scheme.strategy == "channel" else None, keepdims=True)
    scales = (largest / divisor).astype(weight.dtype)
    scales = np.where(scales == 0, ml_dtypes.finfo(weight.dtype).eps, scales).astype(weight.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # of infinities and NaN, which the scales tell of
        scaled = (wide / scales.astype(np.float32)).astype(weight.dtype).astype(np.float32)
        scaled = (scaled + np.float32(0)).clip(least, most)  # the zero point, which makes 0 of -0
        codes = (np.rint(scaled) if scheme.codes.name == "int8" else scaled).astype(scheme.codes.numpy())
    return codes, scales if scheme.strategy == "channel" else scales.reshape(1)


class Channels(Quantised):
    """Weights that are stored so, with a scale for each output channel."""

    suffix, rows = SUFFIX, 1

    def __init__(self, names: Iterable[str], codes: Dtype) -> None:
        super().__init__(names)
        self.scheme = Scheme(codes, "channel")

    def quantize(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return quantize(rows, self.scheme)

    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        return self.scheme.codes, info.dtype

    def columns(self, info: TensorInfo) -> int:
        return 1

    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """As llm-compressor writes it, with activations that are quantised by token as they come."""
        kind = TYPES[self.scheme.codes.name]
        weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": weights | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "config_groups": {"group_0": group},
            "format": f"{kind}-quantized",
            "ignore": [name for name in kept if not name.endswith("embed_tokens")],
            "quant_method": METHOD,
            "quantization_status": "compressed",
        }


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
