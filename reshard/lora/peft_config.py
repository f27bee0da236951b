"""PEFT's ``adapter_config.json``, read and written: which layers have which rank and scale."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from reshard.core.errors import ReshardError
from reshard.lora.names import module_of
from reshard.lora.patterns import Patterns
from reshard.lora.scale import Scale, as_number, most_common

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields that say what the tensors say, or what is done in training alone: any value of theirs is W + scale * B @ A.
READ = (
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "base_model_name_or_path",
)  # fmt: skip
WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "target_parameters",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "qalora_group_size",
    "runtime_config", "ensure_weight_tying", "eva_config", "velora_config",
)  # fmt: skip
# The ways to begin that leave the base as it is: the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) take something from
# it, which PEFT does again where it loads the adapter.
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# What any other field is where it does nothing. A field that is not known here has to be off.
OFF: tuple[Any, ...] = (None, False, [], {})


def check_plain(config: Mapping[str, Any], where: object) -> None:
    """Raise ReshardError, naming the field, for an adapter that is not LoRA or more than that."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ReshardError(f"{where}: peft_type is {kind!r:.80}; only LORA is converted")
    init = config.get("init_lora_weights")
    if not any(init is known or (isinstance(init, str) and init == known) for known in INITS):
        raise ReshardError(
            f"{where}: init_lora_weights is {init!r:.80}, by which PEFT changes the base when it loads the "
            "adapter: save it with save_pretrained(path_initial_model_for_weight_conversion=...), or merge "
            "it with PEFT"
        )
    for field, value in config.items():
        if field in READ or field in WITHOUT_EFFECT or field == "init_lora_weights":
            continue
        # 0 is equal to False, and another value.
        off = any(type(value) is type(each) and value == each for each in OFF)
        if not off and not (field == "bias" and value == "none"):
            raise ReshardError(
                f"{where}: {field} is {value!r:.80}, which is not converted: only LoRA's A and B are"
            )


def scales_of(
    config: Mapping[str, Any], ranks: Mapping[str, int], where: object, names: Mapping[str, str]
) -> dict[str, Scale]:
    """Return the scale of each weight, whose ranks the files have, as PEFT takes it from its config:
    by the weight's own name, or the one in `names`, where its module has another in memory.

    Raises ReshardError if the config has another rank.
    """
    ranks_by_name, alphas_by_name = (
        _patterns(config, name, where) for name in ("rank_pattern", "alpha_pattern")
    )
    rank, alpha = (as_number(config.get(name, 8), name, where) for name in ("r", "lora_alpha"))
    rslora = config.get("use_rslora")
    if rslora not in (None, True, False):
        raise ReshardError(f"{where}: use_rslora is {rslora!r:.80}, neither true nor false")
    scales = {}
    for weight, held in ranks.items():
        module = module_of(names.get(weight, weight))
        expected = ranks_by_name.find(module, rank)
        if expected != held:
            raise ReshardError(f"{where} says that {module} has rank {expected}, but its A has rank {held}")
        scales[weight] = Scale(
            held, as_number(alphas_by_name.find(module, alpha), "lora_alpha", where), bool(rslora)
        )
    return scales


def _patterns(config: Mapping[str, Any], name: str, where: object) -> Patterns:
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise ReshardError(f"{where}: {name} is {patterns!r:.80}, not an object")
    return Patterns(patterns, f"{where}: {name}")


def written_config(
    scales: Mapping[str, Scale],
    linear_weights: Iterable[str],
    base: str | None,
    parameters: Mapping[str, Scale] = MappingProxyType({}),
    in_memory: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the config of an adapter with these scales, by weight, of a model with these
    `linear_weights` that is called `base`; those of whole `parameters` by their names. Modules have the names that they
    have `in_memory`. Raises ReshardError where some are rsLoRA's and some not."""
    modules = {weight: in_memory.get(module_of(weight), module_of(weight)) for weight in scales}
    by_name = {modules[weight]: scale for weight, scale in scales.items()} | dict(parameters)
    kinds = {scale.rslora for scale in by_name.values()}
    if len(kinds) > 1:
        raise ReshardError(
            "some layers of the adapter have rsLoRA's scale and others have not, which PEFT cannot hold"
        )
    rank = int(most_common(scale.rank for scale in by_name.values()))
    alpha = most_common(scale.alpha for scale in by_name.values())
    linear = {module_of(weight) for weight in linear_weights}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _shortest(alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": kinds.pop(),
        "modules_to_save": None,
        "target_modules": target_modules(modules.values(), linear),
        "rank_pattern": {name: scale.rank for name, scale in by_name.items() if scale.rank != rank},
        "alpha_pattern": {
            name: _shortest(scale.alpha) for name, scale in by_name.items() if scale.alpha != alpha
        },
    }
    return config | ({"target_parameters": sorted(parameters)} if parameters else {})


def target_modules(modules: Iterable[str], linear: Iterable[str]) -> list[str]:
    """Return PEFT's ``target_modules``: the last part of the names where all linear layers of that
    name have an adapter, whole names for the others.

    >>> target_modules(["layers.0.q_proj", "layers.1.q_proj", "layers.0.o_proj"], ["layers.0.q_proj", "layers.1.q_proj",
    ...     "layers.0.o_proj", "layers.1.o_proj"])
    ['layers.0.o_proj', 'q_proj']
    """
    chosen, names_by_end = set(modules), defaultdict[str, set[str]](set)
    for module in linear:
        names_by_end[module.rpartition(".")[2]].add(module)
    ends = {end for end, names in names_by_end.items() if names <= chosen}
    return sorted(ends | {module for module in chosen if module.rpartition(".")[2] not in ends})


def _shortest(value: float) -> float:
    return int(value) if value == int(value) else value
