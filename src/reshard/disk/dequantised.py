"""Weights of a Hugging Face directory that are stored as codes with scales: where those are, and what they stand for.

Block-wise fp8 (e4m3) as DeepSeek-V3 publishes it: ``weight = fp8 * weight_scale_inv`` (its technical report, section 3.3;
``weight_dequant`` in its inference code). fp8 and int8 as compressed-tensors writes them, by channel, tensor or block:
``dequantize`` of that package, whose product is one of the scales' own dtype.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError, listed
from reshard.disk import channels, fp8
from reshard.formats.safetensors import Tensor
from reshard.formats.small_files import whole_numbers

MAX_BLOCK = 1 << 20
# Formats of compressed-tensors that store codes as numbers of their own dtype, or none; groups may each have one.
FORMATS = (None, "dense", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("channel", "tensor", "block")
SCALE_DTYPES = ("bfloat16", "float16", "float32")
# What else of a weight is stored where its codes are packed, reordered, or mean something else.
OF_OTHER_CODES = ("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
# What quantises activations, and keys and values, while a model is served.
OF_ACTIVATIONS = frozenset(
    f"{what}_{end}"
    for what in ("input", "output", "q", "k", "v")
    for end in ("scale", "zero_point", "global_scale")
)
READ = (
    f"of {channels.METHOD} reshard reads fp8 and int8 weights with symmetric scales by channel, tensor or block: "
    f"convert the checkpoint that this one was made of"
)


class Codes(NamedTuple):
    """Where the scales of a weight are stored, and how many rows and columns of it share one."""

    scales: str
    block: tuple[int, int]

    def columns(self, columns: int) -> int:
        """How many scales there are for rows of so many `columns`."""
        return -(-columns // self.block[1])


def fp8_blocks(config: Mapping[str, Any], stored: Mapping[str, Tensor], where: str) -> dict[str, Codes]:
    """The weights among `stored` that are fp8 blocks, by name. Raises ReshardError where the ``quantization_config`` or their
    scales do not add up."""
    block = config.get("weight_block_size") or (fp8.BLOCK, fp8.BLOCK)
    if not _is_block(block):
        raise ReshardError(f"{where}: weight_block_size is {block!r:.80}, not two positive whole numbers")
    found = {}
    for scale in (name for name in stored if name.endswith(fp8.SCALE_SUFFIX)):
        name = scale.removesuffix(fp8.SCALE_SUFFIX)
        weight, scales = stored.get(name), stored[scale]
        if (
            weight is None
            or weight.dtype != fp8.FP8
            or len(weight.shape) != 2
            or scales.dtype.name != "float32"
        ):
            raise ReshardError(f"{where}: {scale} does not belong to an fp8 (e4m3) weight, or is not float32")
        blocks = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        if scales.shape != blocks:
            raise ReshardError(
                f"{where}: {scale} has shape {list(scales.shape)}, expected {list(blocks)} for "
                f"blocks of {tuple(block)}"
            )
        found[name] = Codes(scale, (block[0], block[1]))
    return found


class _Way(NamedTuple):
    """How a group of weights is quantised: the dtype of codes, and what shares a scale."""

    codes: str
    strategy: str
    structure: tuple[int, int]

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns of a weight that share a scale."""
        return {"channel": (1, shape[1]), "tensor": (shape[0], shape[1]), "block": self.structure}[
            self.strategy
        ]

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those that the scales of a weight may have, the one that is written first."""
        if self.strategy == "block":
            return [tuple(-(-n // b) for n, b in zip(shape, self.structure, strict=True))]
        return [(shape[0], 1), (shape[0],)] if self.strategy == "channel" else [(1,), (), (1, 1)]


def compressed(config: Mapping[str, Any], stored: Mapping[str, Tensor], where: str) -> dict[str, Codes]:
    """The weights among `stored` that compressed-tensors has quantised, by name; those that it keeps, for whatever reason, have
    no scales. Raises ReshardError where the ``quantization_config`` says what is not read, or scales do not add up."""
    ways = _ways(config, where)
    strange = [name for name in stored if name.rpartition(".")[2] in OF_OTHER_CODES]
    if strange:
        raise ReshardError(f"{where} holds {listed(strange, 3)}, and {READ}")
    found = {}
    for scale in (name for name in stored if name.endswith(f".weight{channels.SUFFIX}")):
        if not ways:
            raise ReshardError(f"{where}: its config_groups quantise no weights, and it holds {scale}")
        name = scale.removesuffix(channels.SUFFIX)
        weight, scales = stored.get(name), stored[scale]
        known = [way for way in ways if weight is not None and way.codes == weight.dtype.name]
        if weight is None or not known or len(weight.shape) != 2:
            dtypes = " or ".join(sorted({way.codes for way in ways}))
            raise ReshardError(f"{where}: {scale} does not belong to a matrix of codes in {dtypes}")
        if scales.dtype.name not in SCALE_DTYPES:
            raise ReshardError(
                f"{where}: {scale} has dtype {scales.dtype.name}, which is none of {', '.join(SCALE_DTYPES)}"
            )
        fitting = [way for way in known if scales.shape in way.shapes(weight.shape)]
        if not fitting:
            expected = " or ".join(f"{way.shapes(weight.shape)[0]} by {way.strategy}" for way in known)
            raise ReshardError(f"{where}: {scale} has shape {scales.shape}, expected {expected}")
        found[name] = Codes(scale, fitting[0].block(weight.shape))
    return found


def _ways(config: Mapping[str, Any], where: str) -> list[_Way]:
    """How groups of weights are quantised. Raises ReshardError where that is not read."""
    groups = config.get("config_groups")
    groups = {} if groups is None else groups
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ReshardError(f"{where}: config_groups is {groups!r:.80}, not an object with groups")
    for name, form in [("its", config.get("format")), *((n, g.get("format")) for n, g in groups.items())]:
        if form not in FORMATS:
            raise ReshardError(f"{where}: {name} format is {form!r:.80}, and {READ}")
    sparsity, turned = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense"):
        raise ReshardError(f"{where}: its weights are stored as sparse ones, {sparsity!r:.80}, and {READ}")
    if not isinstance(turned, Mapping) or turned.get("config_groups"):
        raise ReshardError(f"{where}: its weights are transformed, by transform_config, and {READ}")
    ways = set()
    for name, group in groups.items():
        weights = group.get("weights")
        if weights is None:  # a group of activations
            continue
        weights = weights if isinstance(weights, Mapping) else {}
        how = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric")}
        codes = {kind: dtype for dtype, kind in channels.TYPES.items()}.get(str(how["type"]))
        if (
            how["num_bits"] != 8
            or codes is None
            or how["strategy"] not in STRATEGIES
            or how["symmetric"] is False
        ):
            raise ReshardError(f"{where}: {name} quantises weights as {how!r:.200}, and {READ}")
        structure = weights.get("block_structure") if how["strategy"] == "block" else (1, 1)
        if not _is_block(structure):
            raise ReshardError(
                f"{where}: block_structure of {name} is {structure!r:.80}, not two positive whole numbers"
            )
        ways.add(_Way(codes, how["strategy"], (structure[0], structure[1])))
    # The same shape of scales means the same in all of them but for blocks of several sizes.
    if len({way.structure for way in ways if way.strategy == "block"}) > 1:
        raise ReshardError(f"{where}: its groups have blocks of several sizes, and {READ}")
    return sorted(ways)


def _is_block(block: Any) -> TypeGuard[Sequence[int]]:
    return whole_numbers(block, 2, 1) and len(block) == 2 and max(block) <= MAX_BLOCK


def of_activations(names: Iterable[str]) -> list[str]:
    """Those of the stored tensors of a checkpoint by compressed-tensors that belong to no weight."""
    return [name for name in names if name.rpartition(".")[2] in OF_ACTIVATIONS]


def dequantise(
    quantised: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, int],
    row: int,
    out: np.ndarray,
    codes: Dtype = fp8.FP8,
) -> None:
    """Write ``code * scale``, a product in fp32 that is rounded to the dtype of `scales` and then to that of `out`, to `out
    [rows, columns]`.

    `quantised [rows, columns]` are the bytes of `codes`, fp8 or int8, the first of which are `row` rows into their
    block; `scales` has one for each `block` (rows, columns). A block has 256 possible numbers, so each
    is computed once and looked up.
    """
    rows, columns = quantised.shape
    height, width = block
    across = scales.shape[1]
    numbers = np.arange(256, dtype=np.uint8).view(codes.numpy()).astype(np.float32)
    index_dtype = np.uint16 if across <= 256 else np.uint32
    first_entry = (np.arange(columns) // width * 256).astype(index_dtype)
    # Blocks of a few rows are looked up in one table, as many as 16 bits can tell apart.
    together = 1 if height >= 32 else max(1, 256 // across)
    bits = np.dtype(f"u{out.itemsize}")
    for first in range(0, len(scales), together):
        factors = scales[first : first + together]
        here = slice(max(0, first * height - row), min(rows, (first + len(factors)) * height - row))
        with np.errstate(over="ignore", invalid="ignore"):
            table = (factors.astype(np.float32)[:, :, None] * numbers).astype(scales.dtype).astype(out.dtype)
        entries = quantised[here] + first_entry
        if together > 1:
            below = (np.arange(here.start, here.stop) + row) // height - first
            entries += (below * across * 256).astype(index_dtype)[:, None]
        np.take(table.view(bits).reshape(-1), entries, out=out.view(bits)[here], mode="clip")
