"""A drafter that is trained beside a model: a second model of the same refit.

An EAGLE-3 head, or any other model that drafts tokens for another one, has no class in transformers. So the trainer
says which tensors its checkpoint has (`DeclaredDrafter`), as facts of its weights (`Holder.facts`). Among the canonical
names they begin with `reshard.models.drafters.DRAFTER`.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.models.config_fields import has_no_effect, ignored
from reshard.models.field_tables import NO_EFFECT
from reshard.models.numerics_args import same_value
from reshard.refit.protocol.encoding import pack_json, readable, unpack_json

DIGEST_BYTES = 8
# Fields that engines write anew for their own class of the drafter.
_OF_ENGINES = {
    "architectures",
    "model_type",
    "num_lookahead_tokens",
    "target_layer_count",
    "truncated_vocab_size",
}


class DeclaredDrafter(NamedTuple):
    """A trainer's drafter as it declares it: the shape and the dtype of each tensor of its checkpoint, by published
    name, and its ``config.json``, empty if the trainer has none."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    config: dict[str, Any]

    def encode(self) -> bytes:
        """Return what `declared_drafter` reads."""
        return pack_json({"drafter": self.tensors, "config": self.config})

    def check_config(self, served: Mapping[str, Any], where: str) -> None:
        """Raise ReshardError, with both values, for a field that both configs have and by which an engine's drafter
        would compute something else than the trainer's."""
        for name in sorted(self.config.keys() & served.keys()):
            own, theirs = self.config[name], served[name]
            if name in NO_EFFECT or name in _OF_ENGINES or name in ignored() or has_no_effect(name):
                continue
            if None not in (own, theirs) and not _agree(own, theirs):
                raise ReshardError(
                    f"the trainer's drafter has {name} {own!r:.80}, but the drafter of {where} {theirs!r:.80}: train "
                    f"and serve the same one, or, if that means the same, connect inside of "
                    f'reshard.ignored_config_fields("{name}")'
                )


@runtime_checkable
class DraftingEngine(Protocol):
    """An engine's rank that may draft tokens by another model."""

    def drafter_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the drafter's own tensors by the engine's names, without those that it shares with the model."""


def declared_drafter(facts: Mapping[str, bytes]) -> DeclaredDrafter | None:
    """Return the drafter that a trainer's ranks declare, by the name of each; None without one.

    Raises ReshardError where two declare different ones, or one what makes no sense.
    """
    declared: DeclaredDrafter | None = None
    first = ""
    for who, payload in facts.items():
        what = f"what {who} says of its drafter"
        message = unpack_json(payload, what)
        with readable(what):
            tensors = {
                str(name): (_checked_shape(shape), DTYPES[dtype].name)
                for name, (shape, dtype) in message["drafter"].items()
            }
            own = DeclaredDrafter(tensors, dict(message["config"]))
        if declared is None:
            declared, first = own, who
        elif own != declared:
            raise ReshardError(f"{first} and {who} have different drafters: give all ranks the same one")
    return declared


def _agree(own: Any, theirs: Any) -> bool:
    """Return True for values of a field that mean the same; of settings by name, as rotary ones, those that both have:
    engines write such in anew, as another spelling of a type."""
    if isinstance(own, Mapping) and isinstance(theirs, Mapping):
        return all(_agree(own[name], theirs[name]) for name in own.keys() & theirs.keys())
    return same_value(own, theirs)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not all(type(length) is int and 0 < length < 1 << 40 for length in shape):
        raise ValueError(f"shape {shape!r:.80}")
    return tuple(shape)


def no_drafter_error(engine: str, serves: str, declared: DeclaredDrafter) -> ReshardError:
    """Return the error for a trainer that has a drafter, and an engine that drafts otherwise, as `serves` says."""
    return ReshardError(
        f"the trainer has a drafter ({listed(sorted(declared.tensors), 1)}), and this {engine} {serves}: start it with "
        f"that drafter's checkpoint, or give the trainer's model without it"
    )


def digest_of_drafter(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the bits of an engine's own tensors of a drafter, as one rank has them; empty without any."""
    if not tensors:
        return ""
    total = blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
        total.update(memoryview(bits.numpy()))
    return total.hexdigest()
