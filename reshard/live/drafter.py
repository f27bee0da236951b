"""The drafter that is trained beside a live model: this rank's part, and what all ranks hold together."""

from dataclasses import dataclass
from typing import Any

from reshard.comm.team import Team
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.live.collective import run_on_first
from reshard.live.inventory import WriteAssignment, assign_writers, assigned_numbers, dtype_of_names
from reshard.live.local_boxes import LocalBoxes, uncovered_tensors
from reshard.models.drafters import DRAFTER
from reshard.models.model import Model
from reshard.refit.drafter import DeclaredDrafter, declared_drafter
from reshard.storage.io.streams import TensorInfo
from reshard.trainers.drafter import DraftModel


class LocalDrafter(LocalBoxes):
    """This rank's part of a live drafter, by the canonical names of its tensors."""

    trainer: DraftModel

    def find_boxes(
        self, model: Model, make_vocab_size_divisible_by: int = 128, dtype: str | None = None
    ) -> None:
        """Find the boxes of the drafter's tensors in this rank's memory, floats of them to be published in `dtype`, by
        default in their own. `model` is the one that it drafts for."""
        self._held, self._dtype = self.trainer.publish(model), dtype
        declared = declared_drafter({"this rank": self.trainer.facts()})
        assert declared is not None
        self._shapes = {DRAFTER + name: shape for name, (shape, _) in declared.tensors.items()}
        self.find_regions()


@dataclass(frozen=True)
class DrafterInventory:
    """The drafter of a live model: what its ranks declare, its canonical `tensors`, and, in the first process only,
    which ranks write each of them."""

    declared: DeclaredDrafter
    tensors: dict[str, TensorInfo]
    assignments: dict[str, list[WriteAssignment]]

    def assigned_numbers(self, ranks: int) -> list[dict[str, list[int]]]:
        """Return for each of so many ranks the numbers of the boxes that it writes; in the first process only."""
        return assigned_numbers(self.assignments, ranks)


def take_drafter(team: Team, local: LocalDrafter | None) -> DrafterInventory | None:
    """Gather what every rank holds of the drafter, some perhaps nothing; return None if none does. Raises ReshardError
    on every rank where these have different drafters, or all together lack a part of one."""
    mine = (
        None if local is None else [local.held_boxes(), local.names_by_dtype(), local.trainer.facts().hex()]
    )
    gathered = team.gather(mine)
    assignments: dict[str, list[WriteAssignment]] = {}

    def decide() -> dict[str, Any] | None:
        declared = declared_drafter(
            {f"rank {rank}": bytes.fromhex(of[2]) for rank, of in enumerate(gathered) if of is not None}
        )
        if declared is None:
            return None
        boxes = [{} if of is None else of[0] for of in gathered]
        dtypes = dtype_of_names([of[1] for of in gathered if of is not None])
        shapes = {DRAFTER + name: shape for name, (shape, _) in declared.tensors.items()}
        lacking = uncovered_tensors(boxes, shapes)
        if lacking:
            raise ReshardError(
                f"all ranks together lack elements of {len(lacking)} tensors of the trainer's drafter: "
                f"{listed(lacking, 3)}; give each rank that has some of it a WithDrafter"
            )
        assignments.update(assign_writers(boxes, shapes, {}))
        return {"drafter": declared.encode().hex(), "dtypes": dtypes}

    decided = run_on_first(team, decide)
    if decided is None:
        return None
    declared = declared_drafter({"the first rank": bytes.fromhex(decided["drafter"])})
    assert declared is not None
    tensors = {
        DRAFTER + name: TensorInfo(shape, DTYPES[decided["dtypes"][DRAFTER + name]])
        for name, (shape, _) in declared.tensors.items()
    }
    return DrafterInventory(declared, tensors, assignments)
