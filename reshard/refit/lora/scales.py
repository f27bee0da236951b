"""The ranks and alphas of a trainer's adapter by published weight, as facts of its weights (`Holder.facts`)."""

from collections.abc import Mapping

from reshard.core.errors import ReshardError
from reshard.core.limits import check_number
from reshard.lora.scale import Scale, as_number
from reshard.refit.protocol.encoding import pack_json, readable, unpack_json

MOST_RANK = 1 << 16


def encode_scales(scales: Mapping[str, Scale]) -> bytes:
    """Return what `collect_scales` reads."""
    return pack_json({weight: (scale.rank, scale.alpha, scale.rslora) for weight, scale in scales.items()})


def collect_scales(facts: Mapping[str, bytes]) -> dict[str, Scale]:
    """Return what all of the trainer's ranks, by name, say of its adapter.

    Raises ReshardError where two say different things, or one what makes no sense, and where none has an
    adapter.
    """
    scales: dict[str, Scale] = {}
    said_by: dict[str, str] = {}
    for who, payload in facts.items():
        for weight, scale in _decoded(payload, who).items():
            if scales.setdefault(weight, scale) != scale:
                raise ReshardError(
                    f"{said_by[weight]} has an adapter of {weight} of rank {scales[weight].rank} and alpha "
                    f"{scales[weight].alpha:g}, {who} of rank {scale.rank} and alpha {scale.alpha:g}"
                )
            said_by.setdefault(weight, who)
    if not scales:
        raise ReshardError(
            "the trainer's model has no LoRA adapter: connect without adapter=, or after the adapters are put on"
        )
    return scales


def _decoded(payload: bytes, who: str) -> dict[str, Scale]:
    what = f"what {who} says of its adapter"
    message = unpack_json(payload, what)
    scales = {}
    with readable(what):
        for weight, (rank, alpha, rslora) in message.items():
            check_number(rank, f"{what}: rank", MOST_RANK)
            scales[str(weight)] = Scale(rank, as_number(alpha, "alpha", what), bool(rslora))
    return scales
