"""The shards of a model that each rank of an FSDP2 trainer has written with ``torch.save``, as verl does:
``model_world_size_N_rank_R.pt``.

A file holds a dict of DTensors: the rank's own part of each parameter, and which part that is. The pickle in it is read
into inert records, as all are here.
"""

import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from reshard.core.dtypes import BY_STORAGE, Dtype
from reshard.core.errors import ReshardError, listed
from reshard.formats import torch_zip
from reshard.formats.ranges import ranged
from reshard.formats.small_files import read_at, whole_numbers
from reshard.formats.torch_dist import Checkpoint, Key, Stored

NAME = re.compile(r"model_world_size_([0-9]{1,7})_rank_([0-9]{1,7})\.pt")
_REPLICATE, _SHARD = "Replicate", "Shard"
Numbers = tuple[int, ...]


class LocalPart(NamedTuple):
    """The box ``(offsets, sizes)`` that a rank holds of a parameter of this `shape`."""

    shape: Numbers
    dtype: Dtype
    offsets: Numbers
    sizes: Numbers
    stored: Stored


def shards_in(directory: Path) -> dict[int, Path]:
    """Return the files of the ranks in a directory; nothing if it has none. Raises ReshardError if some are
    missing, or are of two numbers of ranks."""
    found = {path: match for path in directory.glob("*.pt") if (match := NAME.fullmatch(path.name))}
    sizes = {int(match[1]) for match in found.values()}
    if not found:
        return {}
    if len(sizes) > 1:
        raise ReshardError(
            f"{directory} has shards of {' and of '.join(map(str, sorted(sizes)))} ranks: keep those of one save"
        )
    ranks = {int(match[2]): path for path, match in found.items()}
    [size] = sizes
    missing = sorted({*range(size)} - ranks.keys())
    if missing or len(ranks) != size:
        raise ReshardError(
            f"{directory} lacks the shards of ranks {listed(missing, 3)} of {size}: bring them back"
        )
    return dict(sorted(ranks.items()))


def read(directory: Path, iteration: str) -> Checkpoint:
    """Read the shards of all ranks as the keys of a checkpoint, whose chunks are plain bytes of the files. Raises
    ReshardError for what is no DTensor of FSDP2."""
    shards = shards_in(directory)
    keys: dict[str, Key] = {}
    for rank, path in shards.items():
        for name, part in _parts(path, rank, len(shards)):
            key = keys.setdefault(name, Key(part.dtype, part.shape))
            if (key.dtype, key.shape) != (part.dtype, part.shape):
                raise ReshardError(f"{path}: {name} has another dtype or shape than in the shards before")
            key.chunks.setdefault((part.offsets, part.sizes), part.stored)  # of replicas the first
    return Checkpoint(directory, iteration, keys, {})


def _parts(path: Path, rank: int, ranks: int) -> Iterator[tuple[str, LocalPart]]:
    in_store = ranged(path)
    if in_store is not None:
        state, placed = _state(path, in_store.read, in_store.size_bytes)
    else:
        with open(path, "rb") as file:
            state, placed = _state(
                path,
                lambda offset, length: read_at(file.fileno(), length, offset),
                path.stat().st_size,
            )
    if not isinstance(state, dict):
        raise ReshardError(f"{path} holds {type(state).__name__}, not the state dict of a model")
    for name, value in state.items():
        try:
            yield name, _part(value, rank, ranks, path.name, placed)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ReshardError(
                f"{path}: {name!a:.200} is no DTensor of FSDP2 that reshard reads ({error}): {_merged(path)}"
            ) from error


def _state(
    path: Path, read: Callable[[int, int], bytes], size: int
) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return what a shard holds, and where the bytes of its tensors are."""
    try:
        return torch_zip.stored_state(read, size, str(path))
    except ReshardError as error:
        if "refers to" not in str(error):
            raise
        raise ReshardError(f"{error}; if it is of FSDP1 and you trust it, {_merged(path)}") from error


def _merged(path: Path) -> str:
    return (
        f"merge the shards with python -m verl.model_merger merge --backend fsdp --local_dir {path.parent} "
        "--target_dir DIRECTORY"
    )


def _part(value: Any, rank: int, ranks: int, file: str, placed: dict[str, tuple[int, int]]) -> LocalPart:
    if value.name == "_rebuild_parameter":
        value = value.args[0]
    if value.name != "_rebuild_from_type_v2":
        shape, dtype, stored = _plain(value, file, placed)
        return LocalPart(shape, dtype, (0,) * len(shape), shape, stored)
    function, kind, _, state = value.args
    fields = state if isinstance(state, dict) else state[0] or state[1]
    if kind.name != "DTensor" or function.name != "_rebuild_wrapper_subclass":
        raise ValueError(f"it is a {kind.name}")
    spec = fields["_spec"].fields
    shape = tuple(spec["tensor_meta"].args[0])
    sizes, dtype, stored = _plain(fields["_local_tensor"], file, placed)
    if not whole_numbers(shape) or len(shape) != len(sizes):
        raise ValueError("its shape is none")
    mesh = _mesh(spec["mesh"], rank, ranks)
    offsets, expected = [0] * len(shape), list(shape)
    for dim, (length, placement) in enumerate(zip(mesh, spec["placements"], strict=True)):
        coordinate = rank // prod(mesh[dim + 1 :]) % length
        if placement.name == _REPLICATE:
            continue
        if placement.name != _SHARD:
            raise ValueError(f"it is placed as {placement.name}")
        [axis] = placement.args or placement.fields.values()
        if axis not in range(len(shape)) or expected[axis] != shape[axis]:
            raise ValueError("it is split twice along a dim")
        step = -(-shape[axis] // length)
        offsets[axis] = min(coordinate * step, shape[axis])
        expected[axis] = min(step, shape[axis] - offsets[axis])
    if tuple(expected) != sizes:
        raise ValueError(f"its part has shape {list(sizes)}, and {expected} by its placement")
    return LocalPart(shape, dtype, tuple(offsets), sizes, stored)


def _mesh(mesh: Any, rank: int, ranks: int) -> Numbers:
    """Return the lengths of a mesh of all ranks in order, in which a file is that of `rank`."""
    fields = mesh.fields
    if "_layout" in fields:
        layout, order = fields["_layout"].fields, fields["_flatten_rank_map"]
        shape, stride = tuple(layout["shape"]), tuple(layout["stride"])
    else:  # before torch 2.10
        _, _, shape, stride = fields["mesh"].args[:4]
        order = fields["_flatten_mesh_list"]
    in_order = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    if not whole_numbers(shape) or stride != in_order or [*order] != [*range(ranks)] or prod(shape) != ranks:
        raise ValueError(f"its mesh is not one of all {ranks} ranks in order")
    own = [rank // prod(shape[dim + 1 :]) % length for dim, length in enumerate(shape)]
    if [*fields["_coordinate_on_dim"]] != own:
        raise ValueError("it is the part of another rank than the file's name says")
    return tuple(shape)


def _plain(value: Any, file: str, placed: dict[str, tuple[int, int]]) -> tuple[Numbers, Dtype, Stored]:
    """Return shape, dtype and place of a plain tensor."""
    if value.name != "_rebuild_tensor_v2":
        raise ValueError(f"it holds {value.name}")
    (_, storage, record, *_), start, shape, stride = value.args[:4]
    contiguous = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    whole = whole_numbers((start, *shape, *stride))
    if not whole or any(a != b for a, b, n in zip(stride, contiguous, shape, strict=True) if n > 1):
        raise ValueError("its elements do not follow one another")
    dtype = BY_STORAGE[storage.name]
    offset, length = placed[f"data/{record}"]
    needed = prod(shape) * dtype.size
    if start * dtype.size + needed > length:
        raise ValueError("its bytes are cut short")
    return tuple(shape), dtype, Stored(file, offset + start * dtype.size, needed)
