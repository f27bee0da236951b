"""What a rank of a live Megatron holds, and what all ranks hold together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from reshard.core.boxes import Box, whole
from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, listed, rewrite_message
from reshard.core.extras import require
from reshard.core.limits import MAX_VOCAB_MULTIPLE, check_number
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region, check_memory
from reshard.megatron.checkpoint import EMBEDDING, OUTPUT
from reshard.megatron.live.memory import check_one_device
from reshard.megatron.live.pieces import Piece
from reshard.megatron.parameters import padded_vocab_size
from reshard.models.model import Model
from reshard.storage.io.boxes import Rows
from reshard.storage.run.team import Team
from reshard.trainers.megatron import MegatronModel

require("megatron", "torch", "megatron.core")

# What a trainer holds of a model: what ``get_model`` returned, or our view of it.
Models = Sequence[torch.nn.Module] | torch.nn.Module | MegatronModel
# Of a message: a box as the others are told it.
HeldBoxes = list[Any]


class Rank:
    """This rank's part of a live model, by the published names of `model`."""

    def __init__(self, models: Models, metadata: Mapping[str, Any] | None) -> None:
        if isinstance(models, MegatronModel):
            check_memory(models.models)  # it may have been made while they had some
            self.trainer = models
        else:
            self.trainer = MegatronModel(models, metadata)
        check_one_device(self.trainer.models)
        self.device = self.trainer.device or torch.device("cpu")
        self.pieces: list[Piece] = []
        self.fills: list[tuple[Region, Rows]] = []

    def describe(self, model: Model, divisible_by: int) -> None:
        """Find what this rank holds of a model's tensors. Raises ReshardError where the live model computes
        something else, or has parameters that are none of that model's."""
        check_number(divisible_by, "make_vocab_size_divisible_by", MAX_VOCAB_MULTIPLE)
        self.trainer.check_model(model)
        held = self.trainer.publish(model)
        self._check_covered(held)
        self._check_padding(model, divisible_by)
        for tensor, region in zip(held, self.trainer.regions, strict=True):
            dtype = dtype_named(str(region.tensor.dtype))
            if len(tensor.shape) == 1:
                region = region._replace(pitch=1)  # a column
            for part in tensor.parts:
                self.pieces.append(Piece(part.name, part.box, region, Rows.of(part.local_box), dtype))
            self.fills += [(region, Rows.of(box)) for box in tensor.fills]

    def _check_covered(self, held: list[LocalTensor]) -> None:
        """Raise ReshardError for a parameter of which no region has every element."""
        covered: dict[int, int] = {}
        for tensor, region in zip(held, self.trainer.regions, strict=True):
            covered[id(region.tensor)] = covered.get(id(region.tensor), 0) + whole(tensor.shape).volume
        left = [
            name
            for model in self.trainer.models
            for name, parameter in model.named_parameters()
            if covered.get(id(parameter), 0) != parameter.numel()
        ]
        if left:
            raise ReshardError(
                f"the trainer's model has {len(left)} parameters that no published tensor fills: {listed(left)}"
            )

    def _check_padding(self, model: Model, divisible_by: int) -> None:
        """Raise ReshardError where the vocabulary is padded by more than the rule gives: it is another one."""
        rows = max(
            (shard.shape[0] for shard in self.trainer.shards if shard.key in (EMBEDDING, OUTPUT)), default=0
        )
        config: Any = self.trainer.config
        tp = config.tensor_model_parallel_size
        most = padded_vocab_size(model.symbols["V"], divisible_by, tp)
        if rows > most:
            raise ReshardError(
                f"the trainer's model has {rows} vocabulary rows, but vocab_size {model.symbols['V']} of "
                f"{model.where} is padded to at most {most} at TP {tp}: it is another vocabulary, or give "
                f"the make_vocab_size_divisible_by that the trainer has"
            )

    def dtypes(self) -> dict[str, list[str]]:
        """The names of this rank's tensors by dtype."""
        found: dict[str, set[str]] = {}
        for piece in self.pieces:
            found.setdefault(piece.dtype.name, set()).add(piece.name)
        return {dtype: sorted(names) for dtype, names in found.items()}

    def by_name(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor, in the order in which they are told."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, []).append(piece)
        return found

    def told(self) -> dict[str, list[HeldBoxes]]:
        """What the others are told of the pieces: boxes by name, in the order of `pieces`."""
        found: dict[str, list[HeldBoxes]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, []).append([*piece.box.offsets, *piece.box.lengths])
        return found


def box_of(told: Sequence[int]) -> Box:
    """The box that was told."""
    dims = len(told) // 2
    return Box(tuple(told[:dims]), tuple(told[dims:]))


def not_covered(held: list[dict[str, list[HeldBoxes]]], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The canonical tensors of which no rank holds some element."""
    boxes: dict[str, set[tuple[int, ...]]] = {}
    for one in held:
        for name, told in one.items():
            boxes.setdefault(name, set()).update(map(tuple, told))
    left = []
    for name, shape in shapes.items():
        rest = [whole(shape)]
        for box in sorted(boxes.get(name, ())):
            rest = [piece for old in rest for piece in old.minus(box_of(box))]
        if rest:
            left.append(name)
    return left


def keyword_style_errors() -> AbstractContextManager[None]:
    """Inside, sentences name the options of `load`, `save` and `export`, not those of the command line. Nothing is
    resumed: a load or a save is made anew."""
    return rewrite_message(
        ("(;| and|,) run again with --resume", ""),
        ("pass --overwrite", "pass overwrite=True"),
        ("pass --hf-config with", "pass hf_config= with"),
        (r"(?<![\w-])--(dtype|family|workers)\b", r"\1"),
        (r"(?<![\w-])--max-shard-size\b", "max_shard_size"),
        (r"(?<![\w-])--megatron-version\b", "megatron_version"),
    )


def check_alike(team: Team, what: str, mine: dict[str, Any]) -> None:
    """Meet, and raise ReshardError everywhere where what the ranks ask for, by name, is not the same."""
    asked = team.together(lambda: mine)

    def compare() -> None:
        for rank, one in enumerate(asked):
            for name, value in one.items():
                first = asked[0][name]
                if value != first:
                    raise ReshardError(
                        f"the ranks ask for different {what} ({name} is {first} on rank 0, {value} on rank {rank}): give all the same"
                    )

    team.together(compare)


def meet(call: str) -> Team:
    """The ranks that make this call. Raises ReshardError everywhere where some of them make another."""
    team = Team.of_process_group()
    try:
        check_alike(team, "calls", {"the call": call})
    except BaseException:
        team.close()
        raise
    return team


def decide(team: Team, verdict: Callable[[], Any]) -> Any:
    """Run `verdict` in the first process, which alone knows what all ranks have told; its answer."""
    return team.together(lambda: verdict() if team.process == 0 else None)[0]
