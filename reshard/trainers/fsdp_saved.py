"""What a rank of a transformers model under FSDP2 holds of the tensors that transformers saves, where no mapping table
says their names."""

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.boxes import Box, first_overlap, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, as_matrix
from reshard.trainers.fsdp_shards import LocalParameter

if TYPE_CHECKING:
    from reshard.models.saved_tensors import SavedTensor


class _Piece(NamedTuple):
    """A tensor of a checkpoint in a parameter: its name and shape, and the box of the parameter that it has from index
    `first` of its first dim on."""

    name: str
    shape: tuple[int, ...]
    box: Box
    first: int


class SavedPieces:
    """The tensors of checkpoints that each parameter of a model is made of; `saved` are theirs by name."""

    def __init__(self, saved: "Mapping[str, SavedTensor]") -> None:
        self.pieces: dict[str, list[_Piece]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the parameters
        self.whole_dtypes: dict[str, str] = {}  # of parameters that hold whole numbers
        for name, tensor in saved.items():
            for parameter, parameter_shape, box, first in tensor.parts:
                self.pieces[parameter].append(_Piece(name, tensor.shape, box, first))
                self.shapes[parameter] = parameter_shape
                self.whole_dtypes[parameter] = tensor.whole_dtype
        for parameter, pieces in self.pieces.items():
            boxes = [piece.box for piece in pieces]
            if sum(box.volume for box in boxes) != prod(self.shapes[parameter]):
                raise ReshardError(
                    f"transformers saves a part of {parameter} alone, and a refit brings all of it"
                )
            if len(boxes) > 1 and first_overlap(boxes) is not None:
                raise ReshardError(
                    f"transformers saves a part of {parameter} twice, and a refit brings all of it once"
                )

    def is_stack(self, parameter: str) -> bool:
        """Return True for a parameter of three dims, each of whose indices along the first is in tensors of its own:
        experts of a layer."""
        pieces = self.pieces.get(parameter, [])
        return bool(pieces) and all(
            len(piece.box.lengths) == 3 and len(piece.shape) == 2 and piece.box.lengths[0] == 1
            for piece in pieces
        )

    def check_parameter(self, held: LocalParameter) -> None:
        """Raise ReshardError if the trainer's parameter has another shape than that of the class and its config, or
        whole numbers where the class has others, in another dtype or none."""
        expected = self.shapes[held.name]
        if held.shape != expected:
            raise ReshardError(
                f"the trainer's {held.name} has shape {list(held.shape)}, and {list(expected)} by its config"
            )
        dtype, whole_dtype = held.tensor.dtype, self.whole_dtypes[held.name]
        name = str(dtype).removeprefix("torch.")
        if name != whole_dtype if whole_dtype else not dtype.is_floating_point:
            raise ReshardError(
                f"the trainer's {held.name} is {name}, and transformers' class has it in "
                f"{whole_dtype or 'floating point'}: cast it back"
            )

    def local_tensors(self, held: LocalParameter) -> list[LocalTensor]:
        """Return the local tensors of a parameter, one for each of its regions. Raises ReshardError if it is split in
        the middle of what a refit copies as one row."""
        self.check_parameter(held)
        pieces = self.pieces[held.name]
        if not held.shape:  # a single number, as a vector of one
            return [LocalTensor(0, (1,), (Part(piece.name, whole((1,)), (0,)),)) for piece in pieces]
        if not held.of_experts:
            return [_local_tensor(held, pieces, held.box)]
        first, *rest = zip(*held.box, strict=True)
        tensors = []
        for index in range(first[0], first[0] + first[1]):
            own = [
                piece._replace(box=Box(piece.box.offsets[1:], piece.box.lengths[1:]))
                for piece in pieces
                if piece.box.offsets[0] == index
            ]
            inside = Box(*(tuple(side) for side in zip(*rest, strict=True)))
            tensors.append(_local_tensor(held, own, inside))
        return tensors


def _local_tensor(held: LocalParameter, pieces: list[_Piece], box: Box) -> LocalTensor:
    """Return what this rank has as `box` of these pieces' coordinates, in the dims of the published tensors where it
    has these, else as a matrix."""
    as_saved = all(len(piece.shape) == len(box.lengths) for piece in pieces)
    parts = []
    for piece in pieces:
        common = piece.box.intersect(box)
        if common is None:
            continue
        if len(box.lengths) > 2 and any(each.lengths[1:] != box.lengths[1:] for each in (piece.box, common)):
            raise ReshardError(f"the trainer's {held.name} is split along another dim than the first")
        inside, at = common.relative_to(piece.box.offsets), common.relative_to(box.offsets)
        inside = (piece.first + inside[0], *inside[1:])
        if len(box.lengths) > 2 and not as_saved:
            parts.append(Part(piece.name, Box((inside[0], 0), as_matrix(common.lengths)), (at[0], 0)))
        else:
            parts.append(Part(piece.name, Box(inside, common.lengths), at))
    return LocalTensor(0, box.lengths if as_saved else as_matrix(box.lengths), tuple(parts))


def check_saved(
    pieces: SavedPieces, held: list[LocalParameter], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise ReshardError if the trainer's class has other tensors than the served model, which has these `shapes`."""
    own = {piece.name: piece.shape for of_one in pieces.pieces.values() for piece in of_one}
    unknown = sorted({one.name for one in held} - pieces.pieces.keys())
    if unknown:
        raise ReshardError(
            f"the trainer's model holds {len(unknown)} parameters that transformers' class of it does not have: "
            f"{listed(unknown)}"
        )
    other = sorted(name for name in own.keys() | shapes.keys() if own.get(name) != shapes.get(name))
    if other:
        has = [
            f"has shape {list(of[other[0]])}" if other[0] in of else "is not there" for of in (own, shapes)
        ]
        raise ReshardError(
            f"the trainer's model and the served one ({where}) differ in {len(other)} tensors: {other[0]} {has[0]} in "
            f"the trainer, and {has[1]} in the other"
        )
