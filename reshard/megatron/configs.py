"""Compare two configs: fields that make two models of the same weights, which comparing weights cannot
show."""

import math
from typing import Any

from reshard.megatron.arguments import megatron_args
from reshard.models.model import Model
from reshard.models.numerics_args import DERIVED, NUMERICS_ARGS, disagreements

# Two spellings of one number in fp32, as 1e-5 and 9.999999747e-06.
SAME_NUMBER = 1e-6


def config_differences(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    """Return the fields by which two configs make two models of the same weights, with both values.
    Fields that mean the same in other words, or do not affect what the weights compute, are left
    out."""
    args_a, args_b = megatron_args(a), megatron_args(b)
    defaults = {name: value for name, value in NUMERICS_ARGS.items() if value is not DERIVED}
    different = {name: (ours, theirs) for name, theirs, ours in disagreements(defaults | args_b, args_a)}
    different |= {name: (ours, theirs) for name, ours, theirs in disagreements(defaults | args_a, args_b)}
    rotary = {*a.family.rope_args(a.config, a.where), *b.family.rope_args(b.config, b.where)}
    fields: dict[str, tuple[Any, Any]] = {}
    for name, values in different.items():
        if _same_number(*values):
            continue
        if name in rotary:
            fields |= _rope_differences(a, b) or {name: values}
            continue
        field = a.family.field_of(name)
        fields[field or name] = (a.config.get(field), b.config.get(field)) if field else values
    return fields


def sentences_on(fields: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return a sentence for each field that differs."""
    return [
        f"the configs make two models of the same weights: {name} is {_short(a)} in A, {_short(b)} in B"
        for name, (a, b) in fields.items()
    ]


def _rope_differences(a: Model, b: Model) -> dict[str, tuple[Any, Any]]:
    rope_a, rope_b = a.rope(), b.rope()
    names = sorted({*rope_a, *rope_b}, key=lambda name: (name != "rope_type", name))
    pairs = {name: (rope_a.get(name), rope_b.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not _same_number(*pair)}


def _same_number(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other))
    return numbers and math.isclose(one, other, rel_tol=SAME_NUMBER)


def _short(value: Any) -> str:
    return "absent" if value is None else f"{value!r:.80}"
