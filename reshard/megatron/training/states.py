"""The optimizer states of a ``torch_dist`` checkpoint: the format that Megatron saved them in, and which parts
of which parameters they belong to.

| format                       | a tensor of it is                                   | written by          |
|------------------------------|-----------------------------------------------------|---------------------|
| ``fully_reshardable``        | one state of one parameter, split like it           | the distributed one |
| ``regular``                  | the same                                            | any other optimizer |
| ``dp_reshardable``           | a flat buffer of a rank of tensors and stages       | the distributed one |
| ``dp_zero_gather_scatter``   | all buffers of such a rank, as an object            | earlier versions    |
| ``fully_sharded_model_space``| flat pieces of the states of one parameter          | earlier versions    |
| ``fully_sharded_bucket_space``| flat buffers of buckets                            | before 0.14         |

``fsdp_dtensor`` and ``torch_dcp`` are formats of whole checkpoints, which are refused before their states.

The first two can be moved: the key is ``optimizer.state.exp_avg.`` and that of the parameter, and so the
canonical tensors are ``optimizer.state.exp_avg.`` and a published name.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.formats.torch_dist import Checkpoint, Key
from reshard.megatron.checkpoint import NOT_WEIGHTS, Chunk, placement_of_keys
from reshard.megatron.gtp import WITHOUT_GTP, Gtp
from reshard.megatron.parameters import ModelParameters
from reshard.megatron.towers import LANGUAGE_MODEL
from reshard.models.model import Model

STATE = "optimizer.state."
REGULAR = "regular"
MOVABLE = ("fully_reshardable", REGULAR)
# How a run is made one that can be moved, by the format of its states.
RESUME_RESHARDABLE = (
    "resume it once at that layout with --dist-ckpt-optim-fully-reshardable, by which Megatron saves it anew"
)
RESUME_AS_SAVED = (
    "no newer Megatron-Core reads it, so resume it once with the one that saved it, in a format that can be "
    "moved"
)
REMEDIES = {
    "dp_reshardable": RESUME_RESHARDABLE,
    "dp_zero_gather_scatter": f"{RESUME_RESHARDABLE}; without --ckpt-fully-parallel-load",
    "fully_sharded_model_space": RESUME_AS_SAVED,
    "fully_sharded_bucket_space": RESUME_AS_SAVED,
}
# In earlier checkpoints the optimizers of a chain have their number before the key.
_STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")


@dataclass(frozen=True)
class OptimizerStates:
    """The optimizer states of a checkpoint: their format, and, where that can be moved, the
    parameters' keys in each kind (``exp_avg``), with the key that the checkpoint has; `larger` is True of a larger
    model around a language model."""

    format: str
    keys: dict[str, dict[str, str]]
    larger: bool = False

    @property
    def can_move(self) -> bool:
        """True where the states follow from the parameters, whatever the layout."""
        return self.format in MOVABLE and not self.larger

    def names(self) -> set[str]:
        """Return the checkpoint's keys of states that can be moved."""
        return {key for keys in self.keys.values() for key in keys.values()}

    def describe(self) -> str:
        """Return what `inspect` says of them."""
        if self.can_move:
            return f"{self.format} ({', '.join(sorted(self.keys))}), moved by mcore-to-mcore"
        return f"{self.format}, {self.obstacle}"

    @property
    def obstacle(self) -> str:
        """Return why states that cannot be moved cannot, and what to do."""
        if self.larger:
            return (
                "of a larger model, whose language model and tower mcore-to-mcore writes apart: load it at another "
                "layout with its own trainer"
            )
        return f"which belongs to the layout that it was saved at: {self.remedy}"

    @property
    def remedy(self) -> str:
        """Return how to get movable optimizer states for a run whose states cannot be moved."""
        return REMEDIES.get(self.format.partition(" with ")[0], RESUME_RESHARDABLE)


def states_of(checkpoint: Checkpoint) -> OptimizerStates | None:
    """Return the optimizer states of a checkpoint; None if there are none."""
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    others = []
    for key in (*checkpoint.keys, *checkpoint.objects):
        match = _STATE_KEY.fullmatch(key) if key in checkpoint.keys else None
        if match is not None:
            other = kinds[match[1]].setdefault(match[2], key)
            others += [key] if other != key else []
        elif key.startswith(NOT_WEIGHTS["optimizer state"]):
            others.append(key)
    if not kinds and not others:
        return None
    named = _format_named(checkpoint)
    if named is None:
        named = _format_of_keys(checkpoint.keys, kinds, others)
    elif named in MOVABLE and others:
        named = f"{named} with {listed(sorted(others), 1)}"
    return OptimizerStates(named, dict(kinds), any(key.startswith(LANGUAGE_MODEL) for key in checkpoint.keys))


def _format_named(checkpoint: Checkpoint) -> str | None:
    """Return the format that the checkpoint says it has. None if it says nothing."""
    content = checkpoint.common().get("content_metadata")
    named = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return f"{named:.80}" if isinstance(named, str) else None


def _format_of_keys(keys: Mapping[str, Key], kinds: Mapping[str, dict[str, str]], others: list[str]) -> str:
    """Return the format of a checkpoint that does not name it: of an optimizer that is not distributed,
    or of Megatron-Core before 0.13."""
    if others:
        return (
            "dp_zero_gather_scatter"
            if any(".param_state/" in key for key in others)
            else "fully_sharded_bucket_space"
        )
    is_cut_alike = all(
        key not in keys or keys[key].shape == keys[stored].shape
        for of_kind in kinds.values()
        for key, stored in of_kind.items()
    )
    return REGULAR if is_cut_alike else "fully_sharded_model_space"


def check_movable(states: OptimizerStates, where: object) -> None:
    """Raise ReshardError if optimizer states cannot be moved to another layout."""
    if not states.can_move:
        raise ReshardError(
            f"{where} has its optimizer states in the format {states.format}, {states.obstacle}, or pass "
            f"--without-optimizer for the weights alone"
        )


def placement_of_states(
    states: OptimizerStates,
    checkpoint: Checkpoint,
    model: Model,
    parameters: ModelParameters,
    gtp: Gtp = WITHOUT_GTP,
) -> Placement:
    """Find the states of every parameter that has some, as `placement_of_keys` does the parameters.

    Raises ReshardError for the state of a parameter that the model does not have, or of another shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[Any, LocalTensor] = {}
    for kind, of_kind in states.keys.items():
        where, prefix = f"{checkpoint.directory} ({STATE}{kind})", f"{STATE}{kind}."
        keys = {key: checkpoint.keys[stored] for key, stored in of_kind.items()}
        try:
            placed = placement_of_keys(keys, (), where, model, parameters, False, gtp).placement
        except ReshardError as error:
            raise ReshardError(f"{error}; --without-optimizer takes the weights alone") from error
        for (key, *rest), tensor in placed.tensors.items():
            renamed = _of_state(tensor, prefix, (of_kind[key], *rest))
            tensors[renamed.id] = renamed
            shapes |= {prefix + part.name: parameters.shapes[part.name] for part in tensor.parts}
    return Placement(shapes, tensors)


def _of_state(tensor: LocalTensor, prefix: str, new_id: Any) -> LocalTensor:
    """Return a local tensor of a parameter as that of its state."""
    parts = tuple(Part(prefix + name, box, at) for name, box, at in tensor.parts)
    return tensor._replace(id=new_id, parts=parts)


def state_chunks(chunks: Iterable[Chunk], names: Iterable[str]) -> Iterator[Chunk]:
    """Yield the chunks of the states with these canonical names: the same as those of the parameters.

    A chunk that is only padding has a state if its key has one.
    """
    held: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if name.startswith(STATE):
            kind, _, parameter = name.removeprefix(STATE).partition(".")
            held[kind].add(parameter)
    of_parameters = list(chunks)
    for kind, parameters in held.items():
        prefix = f"{STATE}{kind}."
        own = [all(part.name in parameters for part in c.tensor.parts) for c in of_parameters]
        keys = {c.key for c, has in zip(of_parameters, own, strict=True) if has and c.tensor.parts}
        for chunk, has_state in zip(of_parameters, own, strict=True):
            if has_state and chunk.key in keys:
                tensor = _of_state(chunk.tensor, prefix, (prefix + chunk.key, chunk.offsets))
                yield chunk._replace(key=prefix + chunk.key, tensor=tensor)
