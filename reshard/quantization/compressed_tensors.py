"""The configs and names of tensors of compressed-tensors, read and written: which weights of a
checkpoint it has quantized, and by which schemes.

fp8 and int8 by channel, tensor or block (`Channels`), packed int4 and int8 by channel or group
(`IntGroups`), and `Nvfp4`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from reshard.core.errors import ReshardError, listed
from reshard.formats.small_files import whole_numbers
from reshard.quantization import nvfp4
from reshard.quantization.channels import SCALE_SUFFIX, STRATEGIES, TYPES, Channels
from reshard.quantization.fp8_blocks import MAX_BLOCK, is_block
from reshard.quantization.int_groups import (
    CODES,
    PACKED_SUFFIX,
    SHAPE_SUFFIX,
    ZERO_POINT_SUFFIX,
    IntGroups,
    words,
)
from reshard.quantization.nvfp4 import GLOBAL_SCALE_SUFFIX, Nvfp4
from reshard.quantization.scheme import Scheme, StoredTensor, StoredWeight

METHOD = "compressed-tensors"
PACKED_FORMAT, NVFP4_FORMAT = "pack-quantized", "nvfp4-pack-quantized"
# Formats that store codes as numbers of their own dtype, or none; groups may each have one.
PLAIN_FORMATS = (None, "dense", "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
IN_ORDER = (None, False, "weight", "static")  # activation orders that leave columns where they are
CODES_OF_TYPES = {"float": "float8_e4m3fn", "int": "int8"}
SCALE_DTYPES = ("bfloat16", "float16", "float32")
REORDERED_SUFFIXES = ("weight_g_idx",)  # of weights whose columns are in another order
# What quantizes activations, and keys and values, while a model is served.
ACTIVATION_SUFFIXES = frozenset(
    f"{what}_{end}"
    for what in ("input", "output", "activation", "q", "k", "v")
    for end in ("scale", "scale_ub", "zero_point", "global_scale")
)
READ = (
    f"of {METHOD} reshard reads fp8 and int8 weights with symmetric scales by channel, tensor or block, and "
    "packed int4 and int8 by channel or group, and nvfp4: convert the checkpoint that this one was made of"
)

Known = TypeVar("Known", Channels, IntGroups)
# Reads the whole numbers that small stored tensors hold, by name.
ReadNumbers = Callable[[list[str]], dict[str, tuple[int, ...]]]


class Group(NamedTuple):
    """A group of a config that quantizes weights: its name, what the config says of weights, inputs
    and format, and the scheme; None if the scheme is not known."""

    name: str
    arguments: dict[str, Any]
    inputs: Any
    format: str | None
    scheme: Channels | IntGroups | Nvfp4 | None


def groups_of(config: Mapping[str, Any], where: str) -> list[Group]:
    """Return the groups of a config that quantize weights. Raises ReshardError if they say what
    cannot be read."""
    groups = config.get("config_groups")
    groups = {} if groups is None else groups
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ReshardError(f"{where}: config_groups is {groups!r:.80}, not an object with groups")
    parsed = []
    for name, group in groups.items():
        weights, form = group.get("weights"), group.get("format") or config.get("format")
        if weights is None:  # a group of activations
            continue
        weights = weights if isinstance(weights, Mapping) else {}
        keys = ("num_bits", "type", "strategy", "symmetric", "group_size", "actorder")
        arguments = {key: weights.get(key) for key in keys if key != "actorder" or weights.get(key)}
        inputs = group.get("input_activations") or {}
        scheme = _scheme_of(f"{where}: ", name, weights, form)
        parsed.append(Group(name, arguments, inputs, form, scheme))
    return parsed


def _scheme_of(
    where: str, name: str, weights: Mapping[str, Any], form: str | None
) -> Channels | IntGroups | Nvfp4 | None:
    """Return how one group of weights is quantized; None if that is not known."""
    kind, strategy, bits = str(weights.get("type")), str(weights.get("strategy")), weights.get("num_bits")
    symmetric: Any = weights.get("symmetric")
    size: Any = weights.get("group_size")
    ordered = weights.get("actorder") in IN_ORDER
    if not ordered or not whole_numbers([bits]) or not isinstance(symmetric, bool | None):
        return None
    symmetric = symmetric is not False
    if form == NVFP4_FORMAT:
        known = kind == "float" and bits == 4 and strategy == "tensor_group" and symmetric
        return Nvfp4() if known and whole_numbers([size]) and size == nvfp4.GROUP else None
    if form == PACKED_FORMAT:
        if kind != "int" or bits not in CODES or strategy not in ("channel", "group"):
            return None
        if strategy == "channel":
            return IntGroups(bits, None, symmetric)
        if not whole_numbers([size], 1, 1) or size > MAX_BLOCK:
            raise ReshardError(f"{where}group_size of {name} is {size!r:.80}, not a positive whole number")
        return IntGroups(bits, size, symmetric)
    if kind not in CODES_OF_TYPES or bits != 8 or strategy not in STRATEGIES or not symmetric:
        return None
    structure: Any = weights.get("block_structure")
    if strategy == "block" and not is_block(structure):
        raise ReshardError(
            f"{where}block_structure of {name} is {structure!r:.80}, not two positive whole numbers"
        )
    block = (structure[0], structure[1]) if strategy == "block" else None
    return Channels(CODES_OF_TYPES[kind], strategy, block)


def schemes_of(config: Mapping[str, Any], where: str) -> list[Channels | IntGroups | Nvfp4]:
    """Return the schemes of a checkpoint's weights. Raises ReshardError if one cannot be read."""
    groups = groups_of(config, where)
    named = config.get("config_groups") or {}
    for name, form in [("its", config.get("format")), *((n, g.get("format")) for n, g in named.items())]:
        if form not in (*PLAIN_FORMATS, PACKED_FORMAT, NVFP4_FORMAT):
            raise ReshardError(f"{where}: {name} format is {form!r:.80}, and {READ}")
    sparsity, transforms = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format") not in (None, "dense"):
        raise ReshardError(f"{where}: its weights are stored as sparse ones, {sparsity!r:.80}, and {READ}")
    if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
        raise ReshardError(f"{where}: its weights are transformed, by transform_config, and {READ}")
    schemes: dict[Channels | IntGroups | Nvfp4, None] = {}
    for group in groups:
        if group.scheme is None:
            raise ReshardError(
                f"{where}: {group.name} quantizes weights as {group.arguments!r:.200}, and {READ}"
            )
        schemes[group.scheme] = None
    # The same shape of scales means the same in all of them but for blocks of several sizes.
    if len({scheme.block for scheme in schemes if isinstance(scheme, Channels) and scheme.block}) > 1:
        raise ReshardError(f"{where}: its groups have blocks of several sizes, and {READ}")
    return sorted(schemes, key=str)


def find_weights(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str, read_numbers: ReadNumbers
) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that are quantized, by name; those without
    scales are left as they are.

    Raises ReshardError if the ``quantization_config`` says what cannot be read, or scales do not
    add up.
    """
    schemes = schemes_of(config, where)
    reordered = [name for name in tensors if name.rpartition(".")[2] in REORDERED_SUFFIXES]
    if reordered:
        raise ReshardError(f"{where} holds {listed(reordered, 3)}, and {READ}")
    channels = [scheme for scheme in schemes if isinstance(scheme, Channels)]
    groups = [scheme for scheme in schemes if isinstance(scheme, IntGroups)]
    has_nvfp4 = any(isinstance(scheme, Nvfp4) for scheme in schemes)
    names = _packed_names(bool(groups) or has_nvfp4, tensors, where)
    in_nvfp4 = [
        name for name in names
        if has_nvfp4 and (not groups or tensors[name + PACKED_SUFFIX].dtype == nvfp4.CODES)
    ]  # fmt: skip
    in_words = [name for name in names if name not in {*in_nvfp4}]
    weights = _nvfp4_weights(in_nvfp4, tensors, where)
    weights |= _packed_weights(groups, in_words, tensors, where, read_numbers)
    for scale in (name for name in tensors if name.endswith(f".weight{SCALE_SUFFIX}")):
        name = scale.removesuffix(SCALE_SUFFIX)
        if name in weights:
            continue
        if schemes and not channels:
            raise ReshardError(f"{where}: {scale} does not belong to codes, {name}{PACKED_SUFFIX}")
        if not channels:
            raise ReshardError(f"{where}: its config_groups quantize no weights, and it holds {scale}")
        codes = tensors.get(name)
        known = [scheme for scheme in channels if codes is not None and scheme.codes == codes.dtype.name]
        if codes is None or not known or len(codes.shape) != 2:
            dtypes = " or ".join(sorted({scheme.codes for scheme in channels}))
            raise ReshardError(f"{where}: {scale} does not belong to a matrix of codes in {dtypes}")
        scheme = scheme_of_scales(known, scale, tensors[scale], codes.shape, where)
        weights[name] = StoredWeight(name, codes.shape, scheme, (name, scale))
    return weights


def scheme_of_scales(
    known: Sequence[Known], name: str, scales: StoredTensor, shape: tuple[int, ...], where: str
) -> Known:
    """Return the scheme, among `known`, that the scales of a weight have the shape of. Raises
    ReshardError where there is none."""
    if scales.dtype.name not in SCALE_DTYPES:
        raise ReshardError(
            f"{where}: {name} has dtype {scales.dtype.name}, which is not one of {', '.join(SCALE_DTYPES)}"
        )
    fitting = [scheme for scheme in known if scales.shape in scheme.scale_shapes(shape)]
    if not fitting:
        expected = " or ".join(f"{scheme.scale_shapes(shape)[0]} by {scheme.strategy}" for scheme in known)
        raise ReshardError(f"{where}: {name} has shape {scales.shape}, expected {expected}")
    return fitting[0]


def _packed_names(any_packed: bool, tensors: Mapping[str, StoredTensor], where: str) -> list[str]:
    """Return the weights whose codes are packed.

    Raises ReshardError if there are some, but no group of the config packs `any`, or parts of
    some without codes.
    """
    names = [name.removesuffix(PACKED_SUFFIX) for name in tensors if name.endswith(f".weight{PACKED_SUFFIX}")]
    alone = {
        name: name.removesuffix(end) + PACKED_SUFFIX
        for end in (SHAPE_SUFFIX, ZERO_POINT_SUFFIX, GLOBAL_SCALE_SUFFIX) for name in tensors
        if name.endswith(f".weight{end}") and name.removesuffix(end) + PACKED_SUFFIX not in tensors
    }  # fmt: skip
    if (names or alone) and not any_packed:
        packed = listed([*(name + PACKED_SUFFIX for name in names), *alone], 3)
        raise ReshardError(f"{where} holds {packed}, which none of its config_groups has packed")
    for name, codes in alone.items():
        raise ReshardError(f"{where}: {name} does not belong to codes, {codes}")
    twice = [name for name in names if name in tensors]
    if twice:
        raise ReshardError(f"{where} holds both {twice[0]} and {twice[0]}{PACKED_SUFFIX}: remove one of them")
    return names


def _nvfp4_weights(
    names: Iterable[str], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredWeight]:
    """Return the weights that are nvfp4. Raises ReshardError if what belongs to one does not add
    up."""
    weights = {}
    for name in names:
        parts = name + PACKED_SUFFIX, name + SCALE_SUFFIX, name + GLOBAL_SCALE_SUFFIX
        weights[name] = nvfp4.stored_weight(name, parts, tensors, True, where)
        for end in (SHAPE_SUFFIX, ZERO_POINT_SUFFIX):
            if name + end in tensors:
                raise ReshardError(f"{where} holds {name}{end}, which nvfp4 weights have not, and {READ}")
    return weights


def _packed_weights(
    schemes: Sequence[IntGroups],
    names: Sequence[str],
    tensors: Mapping[str, StoredTensor],
    where: str,
    read_numbers: ReadNumbers,
) -> dict[str, StoredWeight]:
    """Return the weights whose codes are packed in words. Raises ReshardError if what belongs to
    one does not add up."""
    for name in names:
        if name + GLOBAL_SCALE_SUFFIX in tensors:
            raise ReshardError(
                f"{where} holds {name}{GLOBAL_SCALE_SUFFIX}, which codes in words have not, and {READ}"
            )
        for end in (SCALE_SUFFIX, SHAPE_SUFFIX):
            if name + end not in tensors:
                raise ReshardError(f"{where} holds {name}{PACKED_SUFFIX} without {name}{end}")
        stored_shape = tensors[name + SHAPE_SUFFIX]
        if stored_shape.dtype.name not in ("int64", "int32") or stored_shape.shape != (2,):
            raise ReshardError(
                f"{where}: {name}{SHAPE_SUFFIX} is {stored_shape.dtype.name} {list(stored_shape.shape)}, not "
                "two whole numbers"
            )
    shapes = read_numbers([name + SHAPE_SUFFIX for name in names])
    return {
        name: _packed_weight(schemes, name, shapes[name + SHAPE_SUFFIX], tensors, where) for name in names
    }


def _packed_weight(
    schemes: Sequence[IntGroups],
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, StoredTensor],
    where: str,
) -> StoredWeight:
    codes, zero_points = tensors[name + PACKED_SUFFIX], tensors.get(name + ZERO_POINT_SUFFIX)
    known = [scheme for scheme in schemes if scheme.fits(shape, codes.shape, zero_points is not None)]
    if codes.dtype.name != "int32" or len({scheme.bits for scheme in known}) != 1:
        kinds = " or ".join(map(str, schemes))
        beside = "without zero points" if zero_points is None else "with zero points"
        raise ReshardError(
            f"{where}: {name}{PACKED_SUFFIX} is {codes.dtype.name} {list(codes.shape)} {beside}, which is no "
            f"weight of {list(shape)} in {kinds}"
        )
    scheme = scheme_of_scales(known, name + SCALE_SUFFIX, tensors[name + SCALE_SUFFIX], shape, where)
    if zero_points is None:
        return StoredWeight(name, shape, scheme, tuple(name + end for end in IntGroups.suffixes))
    expected = (words(shape[0], scheme.bits), scheme.scale_shape(shape)[1])
    if zero_points.dtype.name != "int32" or zero_points.shape != expected:
        raise ReshardError(
            f"{where}: {name}{ZERO_POINT_SUFFIX} is {zero_points.dtype.name} {list(zero_points.shape)}, "
            f"expected int32 {list(expected)}"
        )
    ends = PACKED_SUFFIX, SCALE_SUFFIX, ZERO_POINT_SUFFIX, SHAPE_SUFFIX
    return StoredWeight(name, shape, scheme, tuple(name + end for end in ends))


def activation_scales(names: Iterable[str]) -> list[str]:
    """Return the stored tensors of a checkpoint that belong to no weight, but to activations."""
    return [name for name in names if name.rpartition(".")[2] in ACTIVATION_SUFFIXES]


def config_of(scheme: Scheme, unquantized: Iterable[str]) -> dict[str, Any]:
    """Return a ``quantization_config`` as llm-compressor writes it: one group of all linear layers
    but the modules `unquantized`.

    Activations stay as they are, but for codes of 8 bits, with which they are quantized by token,
    as they come.
    """
    inputs = None
    if isinstance(scheme, Channels):
        kind = TYPES[scheme.codes]
        weights, form = _arguments(8, kind, scheme.strategy), f"{kind}-quantized"
        inputs = weights | {"strategy": "token", "dynamic": True}
    elif isinstance(scheme, IntGroups):
        weights, form = _arguments(scheme.bits, "int", scheme.strategy), PACKED_FORMAT
        weights |= {} if scheme.group is None else {"group_size": scheme.group}
    elif isinstance(scheme, Nvfp4):
        weights, form = _arguments(4, "float", "tensor_group"), NVFP4_FORMAT
        weights |= {"group_size": nvfp4.GROUP, "scale_dtype": f"torch.{nvfp4.SCALES.name}"}
    else:
        raise TypeError(f"llm-compressor writes no {type(scheme).__name__}")
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": [name for name in unquantized if not name.endswith("embed_tokens")],
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def _arguments(bits: int, kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}


def check_can_quantize(config: Mapping[str, Any], what: str) -> None:
    """Raise ReshardError unless `config` wants weights that can be made of plain ones, with
    activations that need no scales."""
    groups = config.get("config_groups")
    all_mappings = isinstance(groups, Mapping) and all(
        isinstance(group, Mapping) for group in groups.values()
    )
    parsed = groups_of(config, what) if all_mappings else []
    if not parsed:
        raise ReshardError(f"{what} wants weights quantized by {METHOD}, but has no config_groups of weights")
    for group in parsed:
        scheme, inputs = group.scheme, group.inputs
        known = scheme is not None
        if isinstance(scheme, IntGroups):
            known = scheme.symmetric and not inputs
        if isinstance(scheme, Channels) and not inputs:
            known = scheme == Channels("float8_e4m3fn")
        if not known:
            raise ReshardError(
                f"{what} wants weights of {group.name} quantized by {METHOD} as {group.arguments}, and of "
                "these reshard makes 8 bits for each channel, tensor or block, with activations in 8 bits "
                "too, fp8 for each channel, and packed int4 or int8 for each channel or group, with plain "
                "activations, all symmetric, and nvfp4 with plain activations"
            )
        if inputs and (isinstance(scheme, Nvfp4) or not inputs.get("dynamic")):
            # "local" of nvfp4 has a global scale that comes with a checkpoint
            wanted = "null" if isinstance(scheme, Nvfp4) else "dynamic"
            raise ReshardError(
                f"{what} wants activations of {group.name} quantized by scales that come with a checkpoint, "
                "which a Megatron checkpoint has not: serve it with a config whose input_activations are "
                f"{wanted}"
            )
