"""The fields of a Hugging Face config: those that are mapped, those without effect, and what the rest may be.

A field is *mapped*, where a mapping table or a rule of its family reads it, or has *no effect* on what the
weights compute. Of the others,

- what transformers' config class has and nothing here maps is refused unless it is at the class's
  *default*;
- what the class does not have cannot change transformers' model. It is a *note*, unless its name
  decides something in another family, in vLLM or in Megatron (`DECIDES_ELSEWHERE`): then it is
  refused by name unless its value is a harmless one.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from reshard.core.errors import OptionError, ReshardError, listed
from reshard.models.field_tables import (
    DECIDES_ELSEWHERE,
    NO_EFFECT_ANYWHERE,
    ROPE_FIELDS,
)

MAX_NAMED = 100  # fields in one sentence
ENVIRONMENT = "RESHARD_IGNORE_CONFIG_FIELDS"

# Read by rules rather than by a table's row.
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
MAPPED = {"architectures", "model_type", "quantization_config", "compression_config", *ROPE_FIELDS}

# Code that publishers put beside their weights, and that reads only fields which the family's
# table, its rules or `NO_EFFECT` name: what is not among those, it does not read either.
KNOWN_CODE = (
    "configuration_deepseek.DeepseekV3Config",
    "modeling_deepseek.DeepseekV3Model",
    "modeling_deepseek.DeepseekV3ForCausalLM",
)
CODE = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")

# How whoever is being answered can have fields ignored.
IGNORE_HINTS = {
    "call": "reshard.ignored_config_fields({quoted})",
    "command": "{options}",
    "engine": f"{ENVIRONMENT}={{names}} in the engine's environment",
    "refit": f"reshard.ignored_config_fields({{quoted}}) around the trainer's connect, or "
    f"{ENVIRONMENT}={{names}} in the engine's environment,",
}
_hint_style: ContextVar[str] = ContextVar("hint_style", default="call")
_unmapped_allowed: ContextVar[bool] = ContextVar("unmapped_allowed", default=False)
_ignored: ContextVar[tuple[str, ...]] = ContextVar("ignored", default=())
_recorded: ContextVar[tuple[str, ...]] = ContextVar("recorded", default=())


@contextmanager
def ignored_config_fields(*names: str, recorded: bool = False) -> Iterator[None]:
    """Ignore these fields of configs, or arguments of checkpoints, inside the context.

    For other processes, such as vLLM's workers, the environment variable RESHARD_IGNORE_CONFIG_FIELDS has the
    same names, with commas between them. What a conversion ignores is `recorded` in its manifest, and is
    ignored again wherever what it wrote is read. Raises OptionError for an empty name.
    """
    if not recorded and not all(name.strip() for name in names):
        raise OptionError(
            "the name of a config field to ignore is empty: name a field, or leave --ignore-config-field out"
        )
    variable = _recorded if recorded else _ignored
    token = variable.set((*variable.get(), *names))
    try:
        yield
    finally:
        variable.reset(token)


def has_no_effect(name: str) -> bool:
    """Return True for a field of any config that changes nothing of what the weights compute."""
    return name in NO_EFFECT_ANYWHERE or name.startswith("_")


def ignored_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that are ignored in this context, with their values: those at its top,
    and of its rotary settings."""
    rotary = [config[name] for name in ROPE_FIELDS if isinstance(config.get(name), dict)]
    names = ignored()
    return {name: value for fields in (*rotary, config) for name, value in fields.items() if name in names}


def ignored() -> set[str]:
    """Return the names that are ignored in this context."""
    return {*_ignored.get(), *_recorded.get(), *filter(None, os.environ.get(ENVIRONMENT, "").split(","))}


@contextmanager
def ignore_hint_for(means: str) -> Iterator[None]:
    """Have error messages inside say how to ignore a field by one of the means of `IGNORE_HINTS`."""
    token = _hint_style.set(means)
    try:
        yield
    finally:
        _hint_style.reset(token)


def ignore_hint(names: Collection[str]) -> str:
    """Return what has these fields ignored, to be pasted by whoever is being answered.

    >>> ignore_hint(["alibi", "bias"])
    'reshard.ignored_config_fields("alibi", "bias")'
    """
    return IGNORE_HINTS[_hint_style.get()].format(
        quoted=", ".join(f'"{name}"' for name in names),
        options=" ".join(f"--ignore-config-field {name}" for name in names),
        names=",".join(names),
    )


@contextmanager
def allow_unmapped_configs() -> Iterator[None]:
    """Read configs inside even where they make a model that cannot be mapped; the model's notices say so. For
    callers that look at bytes and sizes only."""
    token = _unmapped_allowed.set(True)
    try:
        yield
    finally:
        _unmapped_allowed.reset(token)


def unmapped_configs_allowed() -> bool:
    """Return True inside `allow_unmapped_configs`."""
    return _unmapped_allowed.get()


def check_ignored(*models: Any) -> None:
    """Raise ReshardError for a name to be ignored that none of these models' configs, arguments and families
    has: it is misspelled.

    Those from the environment may be meant for other processes."""
    known = set().union(*(model.known_names() for model in models))
    for name in _ignored.get():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ReshardError(
                f"{name} is to be ignored, but no such field is in {' or '.join(model.where for model in models)}, "
                f"nor does {models[0].family.name} have one{hint}"
            )


@dataclass(frozen=True)
class Unmapped:
    """Fields of a config that nothing maps: those that may make another model of the same weights
    (`deciding`), and those that transformers' class does not have and no other family knows (`unread`)."""

    deciding: dict[str, Any]
    unread: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return what is wrong with the deciding ones, and how to go on without them; empty without any."""
        if not self.deciding:
            return ""
        fields = listed((f"{name} = {_shown(value)}" for name, value in self.deciding.items()), MAX_NAMED)
        them = "it" if len(self.deciding) == 1 else "them"
        return (
            f"{fields} may make another model of the same weights, and nothing here maps {them}; "
            f"{ignore_hint(self.deciding)} goes on without {them}"
        )


def unmapped(
    config: dict[str, Any],
    mapped: Collection[str],
    has_no_effect: Callable[[str], bool],
    defaults: Mapping[str, Any],
    always: Mapping[str, Any],
) -> Unmapped:
    """Sort the fields of a config that are not `mapped` by its family, nor without effect.

    `defaults` are the fields of transformers' config class, `always` those whose value the family fixes.
    """
    deciding: dict[str, Any] = {}
    unread = []
    for name, value in config.items():
        if name in mapped or has_no_effect(name) or name in ignored():
            continue
        if name in defaults:
            harmless = _same(value, defaults[name])
        elif name in always:
            harmless = value is None or _same(value, always[name])
        elif name in DECIDES_ELSEWHERE:
            harmless = _is_harmless(value, DECIDES_ELSEWHERE[name])
        else:
            harmless = value is None or not _has_unknown_code(config)
            if value is not None and harmless:
                unread.append(name)
        if not harmless:
            deciding[name] = value
    return Unmapped(deciding, tuple(unread))


def _is_harmless(value: Any, values: tuple[Any, ...]) -> bool:
    if value is None or isinstance(value, list):
        return all(_is_harmless(entry, values) for entry in value or ())
    return any(_same(value, harmless) for harmless in values)


def _has_unknown_code(config: dict[str, Any]) -> bool:
    """Return True if the model is computed by code of its publisher that may read any field."""
    code = config.get("auto_map")
    if not isinstance(code, dict):
        return False
    named = (str(code[kind]).rpartition("--")[2] for kind in CODE if kind in code)
    return any(name not in KNOWN_CODE for name in named)


def _same(value: Any, default: Any) -> bool:
    numbers = number(value) and number(default)
    return (numbers or type(value) is type(default)) and value == default


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


def whole_number(value: Any, least: int = 1) -> bool:
    """Return True for an int, not a bool, of at least `least`."""
    return type(value) is int and value >= least


def number(value: Any) -> bool:
    """Return True for a finite number, not a bool."""
    return type(value) in (int, float) and math.isfinite(value)


def without(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the config without these fields, at its top and among its rotary settings."""
    return {
        name: without(value, names) if name in ROPE_FIELDS and isinstance(value, dict) else value
        for name, value in config.items()
        if name not in names
    }
