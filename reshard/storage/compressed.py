"""Which weights of a Hugging Face directory compressed-tensors has quantized, and how, by its config and by what is stored.

fp8 and int8 by channel, tensor or block, and int4 and int8 in words, by channel or group: ``dequantize`` of that package, whose product
is one of the scales' own dtype. nvfp4: ``NVFP4PackedCompressor``, whose product is one of fp32.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError, listed
from reshard.formats.safetensors import Tensor
from reshard.formats.small_files import whole_numbers
from reshard.storage import channels, packed
from reshard.storage.channels import GLOBAL_END, NVFP4, PACKED, PACKED_END, SHAPE_END, ZEROS_END
from reshard.storage.dequantized import MAX_BLOCK, Codes, Words, fp4_codes, is_block
from reshard.storage.nvfp4 import GROUP

# Formats of compressed-tensors that store codes as numbers of their own dtype, or none; groups may each have one.
FORMATS = (None, "dense", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("channel", "tensor", "block")
IN_ORDER = (None, False, "weight", "static")  # activation orders that leave columns where they are
PACKED_STRATEGIES = ("channel", "group")
TYPES = {"float": "float8_e4m3fn", "int": "int8"}
SCALE_DTYPES = ("bfloat16", "float16", "float32")
# What else of a weight is stored where its codes are reordered.
OF_OTHER_CODES = ("weight_g_idx",)
# What belongs to packed codes only.
BESIDE_PACKED = (SHAPE_END, ZEROS_END, GLOBAL_END)
# What quantizes activations, and keys and values, while a model is served.
OF_ACTIVATIONS = frozenset(
    f"{what}_{end}"
    for what in ("input", "output", "q", "k", "v")
    for end in ("scale", "zero_point", "global_scale")
)
READ = (
    f"of {channels.METHOD} reshard reads fp8 and int8 weights with symmetric scales by channel, tensor or block, and packed "
    f"int4 and int8 by channel or group, and nvfp4: convert the checkpoint that this one was made of"
)


class _Way(NamedTuple):
    """How a group of weights is quantized: the dtype of codes, what shares a scale, how many rows and columns that are where
    it is a block or a group; and of packed codes, which are uint8 if they are nvfp4, the bits of each, and whether they have zero
    points."""

    codes: str
    strategy: str
    structure: tuple[int, int]
    bits: int = 0
    zeros: bool = False

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns of a weight that share a scale."""
        whole = {"channel": (1, shape[1]), "tensor": (shape[0], shape[1])}
        return whole.get(self.strategy, self.structure)

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those that the scales of a weight may have, the one that is written first."""
        if self.strategy in ("block", "group"):
            return [tuple(-(-n // b) for n, b in zip(shape, self.structure, strict=True))]
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        return [(shape[0], 1)] if self.bits else [(shape[0], 1), (shape[0],)]

    def fits(self, shape: tuple[int, ...], words: tuple[int, ...], zeros: bool) -> bool:
        """Whether the packed codes of a weight may have this shape, and zero points."""
        divides = self.strategy != "group" or not shape[1] % self.structure[1]
        return divides and zeros == self.zeros and words == (shape[0], packed.words(shape[1], self.bits))


FP4 = _Way("uint8", "tensor_group", (1, GROUP), 4)

# Reads the whole numbers that small stored tensors hold, by name.
Numbers = Callable[[list[str]], dict[str, tuple[int, ...]]]


def compressed(
    config: Mapping[str, Any], stored: Mapping[str, Tensor], where: str, numbers: Numbers
) -> dict[str, Codes]:
    """The weights among `stored` that compressed-tensors has quantized, by name; those that it keeps, for whatever reason, have
    no scales. Raises ReshardError where the ``quantization_config`` says what is not read, or scales do not add up."""
    ways = _ways(config, where)
    strange = [name for name in stored if name.rpartition(".")[2] in OF_OTHER_CODES]
    if strange:
        raise ReshardError(f"{where} holds {listed(strange, 3)}, and {READ}")
    packed_ways = [way for way in ways if way.bits]
    names = _packed_names(packed_ways, stored, where)
    of_words = [way for way in packed_ways if way != FP4]
    as_fp4, in_words = list[str](), list[str]()
    for name in names:
        fp4 = FP4 in ways and (not of_words or stored[name + PACKED_END].dtype.name == FP4.codes)
        (as_fp4 if fp4 else in_words).append(name)
    found = _fp4(as_fp4, stored, where) | _words(of_words, in_words, stored, where, numbers)
    ways = [way for way in ways if not way.bits]
    for scale in (name for name in stored if name.endswith(f".weight{channels.SUFFIX}")):
        name = scale.removesuffix(channels.SUFFIX)
        if name in found:
            continue
        if packed_ways and not ways:
            raise ReshardError(f"{where}: {scale} does not belong to codes, {name}{PACKED_END}")
        if not ways:
            raise ReshardError(f"{where}: its config_groups quantize no weights, and it holds {scale}")
        weight, scales = stored.get(name), stored[scale]
        known = [way for way in ways if weight is not None and way.codes == weight.dtype.name]
        if weight is None or not known or len(weight.shape) != 2:
            dtypes = " or ".join(sorted({way.codes for way in ways}))
            raise ReshardError(f"{where}: {scale} does not belong to a matrix of codes in {dtypes}")
        way = _way_of_scales(known, scale, scales, weight.shape, where)
        found[name] = Codes((name, scale), way.block(weight.shape))
    return found


def _way_of_scales(
    known: Sequence[_Way], name: str, scales: Tensor, shape: tuple[int, ...], where: str
) -> _Way:
    """Of the `known` ways the one that the scales of a weight are of. Raises ReshardError where it is none."""
    if scales.dtype.name not in SCALE_DTYPES:
        raise ReshardError(
            f"{where}: {name} has dtype {scales.dtype.name}, which is none of {', '.join(SCALE_DTYPES)}"
        )
    fitting = [way for way in known if scales.shape in way.shapes(shape)]
    if not fitting:
        expected = " or ".join(f"{way.shapes(shape)[0]} by {way.strategy}" for way in known)
        raise ReshardError(f"{where}: {name} has shape {scales.shape}, expected {expected}")
    return fitting[0]


def _packed_names(ways: Sequence[_Way], stored: Mapping[str, Tensor], where: str) -> list[str]:
    """The weights whose codes are packed. Raises ReshardError where none of `ways` packs them, or there are parts of other ones."""
    names = [name.removesuffix(PACKED_END) for name in stored if name.endswith(f".weight{PACKED_END}")]
    ends = {
        name: name.removesuffix(end) + PACKED_END for end in BESIDE_PACKED for name in stored
        if name.endswith(f".weight{end}") and name.removesuffix(end) + PACKED_END not in stored
    }  # fmt: skip
    if (names or ends) and not ways:
        raise ReshardError(
            f"{where} holds {listed([*(n + PACKED_END for n in names), *ends], 3)}, which none of its config_groups has packed"
        )
    for name, codes_name in ends.items():
        raise ReshardError(f"{where}: {name} does not belong to codes, {codes_name}")
    twice = [name for name in names if name in stored]
    if twice:
        raise ReshardError(f"{where} holds both {twice[0]} and {twice[0]}{PACKED_END}: remove one of them")
    return names


def _fp4(names: Iterable[str], stored: Mapping[str, Tensor], where: str) -> dict[str, Codes]:
    """The weights that are nvfp4, by name. Raises ReshardError where what belongs to one does not add up."""
    found = {}
    for name in names:
        parts = name + PACKED_END, name + channels.SUFFIX, name + GLOBAL_END
        found[name] = fp4_codes(parts, stored, where, True)
        for end in (SHAPE_END, ZEROS_END):
            if name + end in stored:
                raise ReshardError(f"{where} holds {name}{end}, which nvfp4 weights have not, and {READ}")
    return found


def _words(
    ways: Sequence[_Way], names: Sequence[str], stored: Mapping[str, Tensor], where: str, numbers: Numbers
) -> dict[str, Codes]:
    """The weights whose codes are packed in words, by name. Raises ReshardError where what belongs to one does not add up."""
    for name in names:
        if name + GLOBAL_END in stored:
            raise ReshardError(f"{where} holds {name}{GLOBAL_END}, which codes in words have not, and {READ}")
        for end in (channels.SUFFIX, SHAPE_END):
            if name + end not in stored:
                raise ReshardError(f"{where} holds {name}{PACKED_END} without {name}{end}")
        said = stored[name + SHAPE_END]
        if said.dtype.name not in ("int64", "int32") or said.shape != (2,):
            raise ReshardError(
                f"{where}: {name}{SHAPE_END} is {said.dtype.name} {list(said.shape)}, not two whole numbers"
            )
    shapes = numbers([name + SHAPE_END for name in names])
    found = {}
    for name in names:
        rows, columns = shape = shapes[name + SHAPE_END]
        codes, zeros = stored[name + PACKED_END], stored.get(name + ZEROS_END)
        known = [way for way in ways if way.fits(shape, codes.shape, zeros is not None)]
        if codes.dtype.name != "int32" or len({way.bits for way in known}) != 1:
            kinds = " or ".join(_said(way) for way in ways)
            beside = "without zero points" if zeros is None else "with zero points"
            raise ReshardError(
                f"{where}: {name}{PACKED_END} is {codes.dtype.name} {list(codes.shape)} {beside}, which is no weight of "
                f"{list(shape)} in {kinds}"
            )
        way = _way_of_scales(known, name + channels.SUFFIX, stored[name + channels.SUFFIX], shape, where)
        parts = [name + PACKED_END, name + channels.SUFFIX, name + SHAPE_END]
        if zeros is not None:
            expected = (packed.words(rows, way.bits), way.shapes(shape)[0][1])
            if zeros.dtype.name != "int32" or zeros.shape != expected:
                raise ReshardError(
                    f"{where}: {name}{ZEROS_END} is {zeros.dtype.name} {list(zeros.shape)}, expected int32 {list(expected)}"
                )
            parts.append(name + ZEROS_END)
        words = Words(way.bits, (rows, columns), None if zeros is None else name + ZEROS_END)
        found[name] = Codes(tuple(parts), way.block(shape), words)
    return found


def _said(way: _Way) -> str:
    shared = "each channel" if way.strategy == "channel" else f"groups of {way.structure[1]}"
    return f"int{way.bits} by {shared}{', asymmetric' if way.zeros else ''}"


def _ways(config: Mapping[str, Any], where: str) -> list[_Way]:
    """How groups of weights are quantized. Raises ReshardError where that is not read."""
    groups = config.get("config_groups")
    groups = {} if groups is None else groups
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ReshardError(f"{where}: config_groups is {groups!r:.80}, not an object with groups")
    for name, form in [("its", config.get("format")), *((n, g.get("format")) for n, g in groups.items())]:
        if form not in (*FORMATS, PACKED, NVFP4):
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
        form = group.get("format") or config.get("format")
        ways.add(_way(f"{where}: ", name, weights if isinstance(weights, Mapping) else {}, form))
    # The same shape of scales means the same in all of them but for blocks of several sizes.
    if len({way.structure for way in ways if way.strategy == "block"}) > 1:
        raise ReshardError(f"{where}: its groups have blocks of several sizes, and {READ}")
    return sorted(ways)


def _way(where: str, name: str, weights: Mapping[str, Any], form: str | None) -> _Way:
    """How one group of weights is quantized. Raises ReshardError where that is not read."""
    how: dict[str, Any] = {
        key: weights.get(key) for key in ("num_bits", "type", "strategy", "symmetric", "actorder")
    }
    kind, strategy, bits, zeros = (
        str(how["type"]),
        str(how["strategy"]),
        how["num_bits"],
        how["symmetric"] is False,
    )
    in_words = form == PACKED
    if form == NVFP4:
        known = kind == "float" and bits == 4 and strategy == FP4.strategy and not zeros
        how["group_size"] = weights.get("group_size")
        known &= whole_numbers([how["group_size"]]) and how["group_size"] == GROUP
    elif in_words:
        known = kind == "int" and bits in (4, 8) and strategy in PACKED_STRATEGIES
    else:
        known = kind in TYPES and bits == 8 and strategy in STRATEGIES and not zeros
    known &= isinstance(how["symmetric"], bool | None) and how["actorder"] in IN_ORDER
    if not known or not whole_numbers([bits]):
        raise ReshardError(f"{where}{name} quantizes weights as {how!r:.200}, and {READ}")
    if form == NVFP4:
        return FP4
    if strategy == "group":
        size: Any = weights.get("group_size")
        if not whole_numbers([size], 1, 1) or size > MAX_BLOCK:
            raise ReshardError(f"{where}group_size of {name} is {size!r:.80}, not a positive whole number")
        return _Way("int32", strategy, (1, size), bits, zeros)
    if in_words:
        return _Way("int32", strategy, (1, 1), bits, zeros)
    structure: Any = weights.get("block_structure") if strategy == "block" else (1, 1)
    if not is_block(structure):
        raise ReshardError(
            f"{where}block_structure of {name} is {structure!r:.80}, not two positive whole numbers"
        )
    return _Way(TYPES[kind], strategy, (structure[0], structure[1]))


def of_activations(names: Iterable[str]) -> list[str]:
    """Those of the stored tensors of a checkpoint by compressed-tensors that belong to no weight."""
    return [name for name in names if name.rpartition(".")[2] in OF_ACTIVATIONS]
