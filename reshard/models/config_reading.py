"""Reading a Hugging Face config: which family it is of, its fields with the family's defaults, and what is refused
of it before anything is made of it."""

from typing import Any, NamedTuple

from reshard.core.errors import ReshardError
from reshard.models.config_fields import Unmapped, ignored_fields, unmapped, whole_number, without
from reshard.models.config_rows import ConfigRow
from reshard.models.family import NULLABLE, Family, family_of, is_wrapped
from reshard.models.numerics_args import NUMERICS_ARGS, same_value

# Far above every published model. A config is checked against them before anything is made for each layer or
# expert.
MAX_LAYERS = 10_000
MAX_EXPERTS = 200_000  # in all layers together
MAX_DIM = (1 << 31) - 1


class ConfigReading(NamedTuple):
    """A config as it was read: its family, all fields with the family's defaults, the kinds of its layers, how many
    MTP layers it has, whether it is that of a larger model, a sentence for each field that was ignored as was
    asked, and what nothing maps."""

    family: Family
    config: dict[str, Any]
    kinds: tuple[str, ...]
    mtp_layers: int
    wrapped: bool
    ignored: dict[str, str]
    unmapped: Unmapped


def read_config(config: dict[str, Any], where: str) -> ConfigReading:
    """Read a config. Raises ReshardError for a field that is missing, or has a value that no model has."""
    dropped = ignored_fields(config)
    config = without(config, dropped)
    family = family_of(config, where)
    wrapped = is_wrapped(family, config)
    if wrapped:
        config = _language_model(config, where)
    if config.get("compression_config") is not None:  # as compressed-tensors wrote it before version 0.5
        config = {"quantization_config": config["compression_config"]} | config
    full = family.implied_fields(config, where)
    full |= {name: value for name, value in config.items() if value is not None or name not in full}
    for row in family.config_rows:
        name = row.field
        if row.argument in NUMERICS_ARGS:
            _check_null(row, config, where)
        for alias in row.aliases:
            if full.get(name) is None:
                full[name] = full.get(alias)
            if full.get(alias) is not None and not same_value(full[alias], full[name]):
                raise ReshardError(
                    f"{where}: {name} is {full[name]!r}, but {alias}, which means the "
                    f"same, is {full[alias]!r}"
                )
        if full.get(name) is None:
            full[name] = row.value_where_absent(full, where)
    for row in family.config_rows:
        row.check_value(full[row.field], where)
    for name in family.symbols.values():
        least = 0 if name == family.shared_experts else 1
        if full.get(name) is not None and not whole_number(full[name], least):
            raise ReshardError(f"{where}: {name} is {full[name]!r:.80}, which is not a positive whole number")
    _check_sizes(family, full, where)
    notices = {
        name: f"{where}: {name} = {value!r:.80} is ignored; {_instead(name, full)}"
        for name, value in dropped.items()
    }
    mtp = full.get(family.field_of("mtp_num_layers") or "") or 0
    leftover = unmapped(config, family.fields, family.has_no_effect, family.defaults, family.always)
    kinds = family.layer_kinds(full, where)
    return ConfigReading(family, full, kinds, int(mtp), wrapped, notices, leftover)


def _language_model(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the config of the language model in a larger one, with what the larger one's own
    fields say of it."""
    inner = config.get("text_config")
    if inner is None and "hidden_size" in config:  # as Qwen2.5-VL is published: they are the larger one's own
        inner = {}
    if not isinstance(inner, dict):
        raise ReshardError(f"{where}: text_config is {inner!r:.80}, not the config of a language model")
    outer = {
        name: value
        for name, value in config.items()
        if name not in ("text_config", "vision_config") and (value is not None or name not in inner)
    }
    return inner | outer | {"model_type": inner.get("model_type")}


def _instead(name: str, config: dict[str, Any]) -> str:
    """Say what is used in place of a field that is ignored."""
    return (
        f"{config[name]!r:.80} is used, as where it is absent"
        if config.get(name) is not None
        else "the config is read as if it lacked it"
    )


def _check_sizes(family: Family, config: dict[str, Any], where: str) -> None:
    """Raise ReshardError for sizes that no model has, alone or together."""

    def field(argument: str) -> str:
        return family.field_of(argument) or ""

    limits = dict.fromkeys(family.symbols.values(), MAX_DIM)
    limits |= dict.fromkeys(filter(None, (field("num_layers"), field("mtp_num_layers"))), MAX_LAYERS)
    for name, most in limits.items():
        if (config.get(name) or 0) > most:
            raise ReshardError(f"{where}: {name} is above {most:,}, which no model's is")
    experts, groups = field("num_experts"), field("moe_router_num_groups")
    if config[field("num_layers")] * (config.get(experts) or 1) > MAX_EXPERTS:
        raise ReshardError(f"{where}: experts times layers are above {MAX_EXPERTS:,}, which no model's are")
    for part, whole in ((field("moe_router_topk"), experts), (field("moe_router_group_topk"), groups)):
        if config.get(part) and config.get(whole) and config[part] > config[whole]:
            raise ReshardError(f"{where}: {part} is {config[part]}, but {whole} is {config[whole]}")
    for part, whole in ((field("num_query_groups"), field("num_attention_heads")), (groups, experts)):
        if config.get(part) and config.get(whole) and config[whole] % config[part]:
            raise ReshardError(f"{where}: {part} {config[part]} does not divide {whole} {config[whole]}")


def _check_null(row: ConfigRow, config: dict[str, Any], where: str) -> None:
    """Raise ReshardError if a field is null that transformers would not take as absent: it may make
    another model, such as one whose switch is off."""
    nulls = [name for name in row.spellings if name in config and config[name] is None]
    if nulls and row.default is not None and row.field not in NULLABLE:
        raise ReshardError(
            f"{where}: {nulls[0]} is null, which is not what it is where it is absent: say which value is "
            f"meant, or leave it out"
        )
