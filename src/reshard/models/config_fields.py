"""Which fields of a Hugging Face config say something, and what they may be.

A field is *mapped*, where a mapping table or a rule of its family reads it; or it is known to have *no
effect* on what the weights compute; or it is at its *default* in transformers. Any other is refused by name:
it may make another model of the same weights.
"""

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from reshard.core.errors import ReshardError, listed
from reshard.models.config_defaults import DEFAULTS
from reshard.models.rope import ROPE_FIELDS

if TYPE_CHECKING:
    from reshard.models.family import Family

ENVIRONMENT = "RESHARD_IGNORE_CONFIG_FIELDS"

# Read by rules rather than by a table's row.
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
MAPPED = {"architectures", "model_type", "quantization_config", *ROPE_FIELDS}

# Tokens, files, dtypes on disk, what a call returns or how it samples, and what says only how to train.
NO_EFFECT = """
bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix model_max_length
torch_dtype dtype transformers_version auto_map unsloth_version unsloth_fixed task_specific_params finetuning_task
use_cache output_hidden_states output_attentions output_router_logits output_scores return_dict return_dict_in_generate
id2label label2id num_labels problem_type chunk_size_feed_forward
torchscript attn_implementation attention_implementation use_flash_attention_2 pretraining_dataset
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
begin_suppress_tokens
""".split()

# Fields that earlier versions of transformers, or published configs, write though the class does not know
# them.
OTHER_DEFAULTS: dict[str, Any] = {
    "is_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False,
    "pruned_heads": {}, "use_bfloat16": False, "tf_legacy_loss": False, "use_mrope": False,
}  # fmt: skip

_ignored: ContextVar[tuple[str, ...]] = ContextVar("ignored", default=())
_recorded: ContextVar[tuple[str, ...]] = ContextVar("recorded", default=())


@contextmanager
def ignored_config_fields(*names: str, recorded: bool = False) -> Iterator[None]:
    """Inside, these fields of a config (or arguments of a checkpoint) may say what they like, and are not
    looked at.

    For other processes, such as vLLM's workers, the environment variable RESHARD_IGNORE_CONFIG_FIELDS has the
    same names, with commas between them. What a conversion ignores is `recorded` in its manifest, and is
    ignored again wherever what it wrote is read.
    """
    variable = _recorded if recorded else _ignored
    token = variable.set((*variable.get(), *names))
    try:
        yield
    finally:
        variable.reset(token)


def ignored() -> set[str]:
    """The names that are ignored here."""
    return {*_ignored.get(), *_recorded.get(), *filter(None, os.environ.get(ENVIRONMENT, "").split(","))}


def check_ignored(*models: Any) -> None:
    """Raise ReshardError for a name to be ignored that none of these models' configs, arguments and families
    has: it is misspelt.

    Those from the environment may be meant for other processes."""
    known = set().union(*(model.known_names() for model in models))
    for name in _ignored.get():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ReshardError(
                f"--ignore-config-field {name}: no such field is in {' or '.join(model.where for model in models)}, "
                f"nor does {models[0].family.name} have one{hint}"
            )


def check_fields(family: "Family", config: dict[str, Any], where: str) -> None:
    """Raise ReshardError, naming them, for fields that may make another model of the same weights."""
    defaults = OTHER_DEFAULTS | DEFAULTS[family.name]
    unknown = []
    for name, value in config.items():
        if name in family.fields or family.has_no_effect(name) or name in ignored():
            continue
        if name not in defaults and value is None:
            continue  # of a field that no class has
        if name not in defaults or not _same(value, defaults[name]):
            unknown.append(f"{name} = {_shown(value)}")
    if unknown:
        raise ReshardError(
            f"{where}: {listed(unknown)} may make another model of the same weights: nothing here maps it, "
            f"and {family.name} has no such field or another default in transformers; --ignore-config-field "
            f"NAME goes on without it"
        )


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."


def whole_number(value: Any, least: int = 1) -> bool:
    """Whether this is an int, and no bool, of at least so much."""
    return type(value) is int and value >= least


def number(value: Any) -> bool:
    """Whether this is a finite number, and no bool."""
    return type(value) in (int, float) and math.isfinite(value)


def without(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The config without these fields."""
    return {name: value for name, value in config.items() if name not in names}
