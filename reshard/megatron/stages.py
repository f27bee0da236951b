"""Pipeline stages: which decoder layers each has, by Megatron's sizes or by its layout string."""

import re
from dataclasses import dataclass
from math import isqrt

from reshard.core.errors import OptionError, ReshardError
from reshard.models.config_reading import MAX_LAYERS
from reshard.models.model import Model


@dataclass(frozen=True)
class Stage:
    """One virtual pipeline stage: its decoder layers by global number, and whether it has the embedding, the
    output layer and the MTP layers."""

    layers: tuple[int, ...]
    embedding: bool = False
    output: bool = False
    mtp: bool = False


def stages_of_sizes(
    model: Model,
    pp: int,
    vpp: int,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> list[list[Stage]]:
    """Spread a model's layers evenly; return the stages as ``[pp rank][virtual stage]``.

    `first` and `last` fix the number of layers of the first and the last rank. With
    `count_embedding` and `count_loss` the embedding and the loss take the place of a layer. Raises
    ReshardError where layers are left over.
    """
    if vpp > 1 and pp == 1:
        raise OptionError(f"--vpp {vpp} needs --pp above 1")
    per_rank = _layers_per_rank(model.num_layers, pp, first, last, count_embedding, count_loss)
    for count in per_rank:
        if count % vpp:
            raise ReshardError(
                f"--vpp {vpp} does not divide a stage of {count} layers; sizes that do: {numbers(divisors(count))}"
            )
    stages: list[list[Stage]] = [[] for _ in range(pp)]
    next_layer = 0
    for virtual in range(vpp):
        for rank in range(pp):
            is_first, is_last = rank == virtual == 0, (rank, virtual) == (pp - 1, vpp - 1)
            count = per_rank[rank] // vpp - (is_first and count_embedding) - (is_last and count_loss)
            if count < 0:
                raise ReshardError(
                    "a stage with the embedding or the loss in the pipeline split has no slot for it"
                )
            layers = tuple(range(next_layer, next_layer + count))
            stages[rank].append(Stage(layers, is_first, is_last, is_last and model.mtp_layers > 0))
            next_layer += count
    return stages


def _layers_per_rank(
    layers: int, pp: int, first: int | None, last: int | None, count_embedding: bool, count_loss: bool
) -> list[int]:
    """Return how many slots for layers each pipeline rank has."""
    options = "--num-layers-in-first-pipeline-stage and --num-layers-in-last-pipeline-stage"
    uneven = first is not None or last is not None
    if uneven and (count_embedding or count_loss):
        raise OptionError(f"{options} do not go with embedding or loss in the pipeline split")
    if uneven and pp == 1:
        raise OptionError(f"{options} need --pp above 1")
    fixed = {rank: count for rank, count in ((0, first), (pp - 1, last)) if count is not None}
    slots = layers + count_embedding + count_loss
    others, left = pp - len(fixed), slots - sum(fixed.values())
    if (others and left % others) or (not others and left) or left < 0:
        if left < 0:
            raise ReshardError(f"{options} are {sum(fixed.values())} of the model's {slots} layers")
        if fixed:
            raise ReshardError(
                f"{left} of {layers} layers are left for the {others} other pipeline stages, which do not divide "
                f"them"
            )
        raise ReshardError(
            f"--pp {pp} does not divide {slots} layers; sizes that do: {numbers(divisors(slots))}, or use "
            f"{options.replace(' and', ',')} or --pipeline-model-parallel-layout"
        )
    return [fixed.get(rank, left // others if others else 0) for rank in range(pp)]


def stages_of_string(model: Model, text: str, pp: int, vpp: int) -> list[list[Stage]]:
    """Read ``--pipeline-model-parallel-layout``; return the stages as ``[pp rank][virtual stage]``.

    Raises ReshardError if the string does not have the model's layers, or Megatron would not take it.
    """
    rows = parse_pipeline(text)
    if len(rows) % pp or (vpp > 1 and len(rows) != pp * vpp):
        raise OptionError(
            f"pipeline layout {text!r} has {len(rows)} stages, which --pp {pp} --vpp {vpp} does not fit"
        )
    letters = "".join(rows)
    for letter, count, name in (
        ("E", 1, "embedding (E)"),
        ("L", 1, "loss (L)"),
        ("t", model.num_layers, "decoder layers (t)"),
        ("m", model.mtp_layers, "MTP layers (m)"),
    ):
        if letters.count(letter) != count:
            raise ReshardError(
                f"pipeline layout {text!r} has {letters.count(letter)} {name}; the model has {count}"
            )
    if not re.fullmatch("Et*m*L", letters):
        raise OptionError(f"pipeline layout {text!r} must run from E over t and m to L")
    with_mtp = [index for index, row in enumerate(rows) if "m" in row]
    before_last_virtual_stage = any(index < len(rows) - pp for index in with_mtp)
    on_first_rank = pp > 1 and any(index % pp == 0 for index in with_mtp)
    if len(with_mtp) > 1 or before_last_virtual_stage or on_first_rank:
        raise ReshardError(
            f"pipeline layout {text!r} must keep all m in one last virtual stage, not on the first rank"
        )
    stages: list[list[Stage]] = [[] for _ in range(pp)]
    next_layer = 0
    for index, row in enumerate(rows):
        layers = tuple(range(next_layer, next_layer + row.count("t")))
        stages[index % pp].append(Stage(layers, "E" in row, "L" in row, "m" in row))
        next_layer += len(layers)
    return stages


def parse_pipeline(text: str) -> list[str]:
    """Return the stages of Megatron's ``--pipeline-model-parallel-layout``, in pipeline order.

    >>> parse_pipeline("Et*2|(tt|)*2,mL")
    ['Ett', 'tt', 'tt', 'mL']
    """
    unrolled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*([0-9]+)", r"(.)\*([0-9]+)"):
        # Digits are counted before they are read: Python refuses to read thousands of them.
        if len(unrolled) > 4 * MAX_LAYERS:
            raise OptionError(
                f"pipeline layout {shortened(text)} has {len(text):,} characters; it describes "
                f"at most {MAX_LAYERS} layers"
            )
        too_long = [
            m for m in re.finditer(pattern, unrolled) if len(m[2]) > 6 or len(m[1]) * int(m[2]) > MAX_LAYERS
        ]
        if too_long or sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, unrolled)) > 2 * MAX_LAYERS:
            part = too_long[0][0] if too_long else text
            raise OptionError(
                f"pipeline layout {shortened(text)} repeats {shortened(part)}; at most "
                f"{MAX_LAYERS} layers can be laid out"
            )
        unrolled = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), unrolled)
    unknown = set(unrolled) - set("EtmL|")
    if unknown or not unrolled:
        raise OptionError(
            f"pipeline layout {shortened(text)} has {' '.join(sorted(unknown)[:20]) or 'nothing'} in it; it is "
            f"made of E, t, m, L, | and *n"
        )
    return unrolled.split("|")


def shortened(text: str) -> str:
    """Return a text as errors quote it: its first 100 characters."""
    return repr(text) if len(text) <= 100 else repr(text[:100]) + " ..."


def divisors(n: int) -> list[int]:
    """Return the divisors of `n` in ascending order."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def numbers(values: list[int]) -> str:
    """Join numbers for an error message."""
    return ", ".join(map(str, values))
