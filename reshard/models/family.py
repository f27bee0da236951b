"""Families of models: the base class of mapping files, with its defaults."""

import importlib
import json
import pkgutil
from functools import cache, cached_property
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.models.config_defaults import DEFAULTS
from reshard.models.config_fields import MAPPED, WINDOW, ignore_hint, whole_number
from reshard.models.config_rows import ConfigRow, Equality, Refusal
from reshard.models.field_tables import NO_EFFECT, NO_EFFECT_ENDS
from reshard.models.layer_kinds import PATTERN_FIELDS, kinds_by_pattern, pattern_fields
from reshard.models.numerics_args import same_value
from reshard.models.rope import megatron_rope, rope_of
from reshard.models.table_checks import check_family
from reshard.models.tables import Row, read_rows

# Where null means what absence means, in transformers too.
NULLABLE = ("head_dim", "num_key_value_heads", "num_nextn_predict_layers")
# What Megatron's arguments are for every family here, unless its `megatron` says otherwise.
MEGATRON: dict[str, Any] = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "multi_latent_attention": False, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False,
    "rotary_interleaved": False,
}  # fmt: skip
# The same of families with experts.
MEGATRON_MOE: dict[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
}
# Megatron's local layers: the parameters that have another name in a checkpoint than in one of Transformer
# Engine layers; with multi-latent attention they are others.
LOCAL_NAMES = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
LOCAL_NAMES_LATENT = {
    "mlp.linear_fc1.layer_norm_weight":                  "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight":  "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}  # fmt: skip


class Family:
    """An architecture. A mapping file is a subclass that says what sets it apart: a table of literals, and a
    method of this class where a rule is the family's own.

    Every family says:

    - `name`: transformers' ``model_type``; `architecture`: its model class, as ``architectures`` of
      a config names it.
    - `symbols`: the letters of shapes, and the config fields that they stand for. `derived`:
      further letters, and the sizes that they stand for in terms of the others.
    - `config`: rows of (config field, Megatron's argument, relation, default). ``|`` joins the
      field's spellings; the relation is ``=`` or ``not``; the default is what transformers has
      where the field is absent: a value, another field, the quotient of two, or ``needed``. Its
      type is the field's: a switch, an amount (with a point, or ``needed, an amount``), or else a
      whole number.
    - `layer`: the rows of a decoder layer, in the columns of `reshard.models.tables`.
    - `identifies`: values of Megatron's arguments by which a checkpoint without a Hugging Face
      config is taken for one of this family: True for an argument that is set, False for one that
      is not. Any two families differ in one, but for those that Megatron holds alike. Empty where
      they are another family's arguments too, which such a checkpoint is taken for then.

    and, where the values below do not hold, any of these:

    - `megatron`, `hf`: arguments and config fields that are the same for all its models.
      `model_types`: other names by which the same architecture is published.
    - `model`, `mtp`: the rows outside the layers, and those of a multi-token-prediction layer
      besides the decoder layer in it.
    - `kind_words`: the words that `layer_kinds` says of a layer, ``dense`` or ``moe`` among them.
    - `specs`: ``module:function``, where Megatron's own specs lack this family's layers. The
      function takes and returns what `reshard.megatron.layers.specs.standard_specs` does.
    - `first_dense`: the field with the number of dense layers, after which all have experts.
      `mlp_types`: the field with ``dense`` or ``sparse`` for each layer, which says the same to
      transformers. `shared_experts`: the field with the number of experts that every token goes to,
      each as wide as a routed one.
    - `layer_letters`: by kind of layer (its `kind_words`), the letter of such a layer in the pattern of
      Megatron's HybridModel, for a family whose layers are each one layer of that, so that no
      GPTModel has them; its configs have the kinds in `PATTERN_FIELDS` of `reshard.models.layer_kinds`.
      Empty where a layer is an attention and an MLP, as in a GPTModel.
    - `in_memory`: the names, within a layer, of parameters that a transformers model has under
      other names than its checkpoint. `in_memory_prefix`: what published names begin with, and what
      instead in a transformers model.
    - `rotary`: the symbol of a head's dims that turn; `partial_rotary`: which share of them does
      where the config does not say, None if it is all and nothing else is mapped; `rope_theta`:
      the base where it does not say; `rope_types`: the rotary embeddings that Megatron has for it.
    - `window`: which layers attend to a window where ``use_sliding_window`` is set: ``from
      max_window_layers`` on, or ``everywhere``; empty for a family without such fields. Only a
      config without any such layer is taken.
    - `reads`: fields that only its own methods read.
    - `refused`: (field, values that are mapped, why others are not). `equal`: (field, another field
      or a sum of fields that it has to equal, why).
    - `no_effect`: fields that change nothing of what the weights compute, besides those of
      `reshard.models.config_fields`. Any other field of transformers' class has to be at its
      default there.
    - `always`: fields that transformers' class does not have, and what they are for every model of
      the family; at another value they are refused.
    - `packed`: (name of a row, the part of a tensor of all experts that published files may have in
      its place). Both are read; this is what is written. `packed_otherwise`: the same of files in
      which these tensors have other shapes; they are read. `packed_codes`: the same of files with
      quantized experts, where these are other tensors. `experts_apart`: False if no file ever
      has the experts apart, and the names of the rows are ours.
    - `wrapped_in`: architecture and ``model_type`` of a model that has this one as its language
      model, its config under ``text_config``; `wrapped_class`: another name of that architecture,
      such as transformers' class for it; `wrapped_names`: what names begin with, and what
      instead in that model; `towers`: what the names of its other tensors begin with, or of a model
      that is in no larger one, which are carried from disk to disk unchanged; `tower`: the
      table of `reshard.models.towers` with what these have to be by the config, and where they
      lie in a Megatron model that has them.
    - `mtp_prefixes`: what the names of an MTP layer's own tensors, and of those of the decoder
      layer in it, begin with; ``{layers}`` stands for `layers`, ``{layer}`` counts on from the
      decoder layers, ``{index}`` from 0, and ``{part}`` the decoder layers in one MTP layer.
    - `layers`, `ends`, `outputs`: where the modules are whose outputs transformers and Megatron
      both have; ``|`` between those of Megatron's of which a layer has one.
    """

    name: str
    architecture: str
    symbols: dict[str, str]
    config: tuple[tuple[str, str, str, Any], ...]
    layer: tuple[tuple[str, ...], ...]
    identifies: dict[str, Any]

    megatron: dict[str, Any] = {}
    hf: dict[str, Any] = {}
    model: tuple[tuple[str, ...], ...] = (
        ("model.embed_tokens.weight", "V H", "embedding.word_embeddings.weight", "vocab", "tp 0", "always"),
        ("model.norm.weight",         "H",   "decoder.final_layernorm.weight",   "plain", "-",    "always"),
        ("lm_head.weight",            "V H", "output_layer.weight",              "vocab", "tp 0", "not tie_word_embeddings"),
        ("lm_head.weight",            "V H", "embedding.word_embeddings.weight", "copy",  "tp 0", "tie_word_embeddings", "optional"),
    )  # fmt: skip
    mtp: tuple[tuple[str, ...], ...] = (
        ("enorm.weight",            "H",     "enorm.weight",                     "plain", "-",    "always"),
        ("hnorm.weight",            "H",     "hnorm.weight",                     "plain", "-",    "always"),
        ("eh_proj.weight",          "H 2*H", "eh_proj.weight",                   "plain", "tp 0", "always"),
        ("shared_head.norm.weight", "H",     "final_layernorm.weight",           "plain", "-",    "always"),
        ("embed_tokens.weight",     "V H",   "embedding.word_embeddings.weight", "copy",  "tp 0", "always"),
        ("shared_head.head.weight", "V H",   "output_layer.weight",              "copy",  "tp 0", "not tie_word_embeddings"),
        ("shared_head.head.weight", "V H",   "embedding.word_embeddings.weight", "copy",  "tp 0", "tie_word_embeddings", "optional"),
    )  # fmt: skip
    model_types: tuple[str, ...] = ()
    kind_words: tuple[str, ...] = ("dense", "moe")
    derived: dict[str, str] = {}
    specs = ""
    first_dense = ""
    mlp_types = ""
    shared_experts = ""
    layer_letters: dict[str, str] = {}
    in_memory: tuple[tuple[str, str], ...] = ()
    in_memory_prefix = ("", "")
    rotary = "D"
    partial_rotary: float | None = None
    rope_theta = 10000.0
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    window = ""
    reads: tuple[str, ...] = ()
    refused: tuple[tuple[str, tuple, str], ...] = ()
    equal: tuple[tuple[str, str, str], ...] = ()
    no_effect: tuple[str, ...] = ()
    always: dict[str, Any] = {}
    packed: tuple[tuple[str, str], ...] = ()
    packed_otherwise: tuple[tuple[str, str], ...] = ()
    packed_codes: tuple[tuple[str, str], ...] = ()
    experts_apart = True
    has_megatron_names = True  # False for one that is no table, and knows of Megatron nothing
    kept_in_fp32: frozenset[str] = (
        frozenset()
    )  # canonical tensors that are never cast down, beside rows marked so
    # Of such a one, why the table that covers its architecture does not take its config.
    refused_by_table = ""
    wrapped_in = ("", "")
    wrapped_class = ""
    wrapped_names = ("model.", "model.language_model.")
    towers: tuple[str, ...] = ()
    tower = ""
    mtp_prefixes = ("{layers}{layer}.", "{layers}{layer}.")
    # place for people, module in transformers, module in Megatron
    layers = "model.layers."
    ends = (
        ("the embedding",    "model.embed_tokens", "embedding"),
        ("the final norm",   "model.norm",         "decoder.final_layernorm"),
        ("the output layer", "lm_head",            "output_layer"),
    )  # fmt: skip
    outputs: tuple[tuple[str, str, str], ...] = (
        ("input norm", "input_layernorm",          "input_layernorm"),
        ("attention",  "self_attn",                "self_attention"),
        ("MLP norm",   "post_attention_layernorm", "pre_mlp_layernorm"),
        ("MLP",        "mlp",                      "mlp"),
    )  # fmt: skip

    def __init__(self) -> None:
        """Read the tables. Raises ValueError, naming file and row, if one does not follow the columns."""
        if self.layer_letters:
            self.kind_words = tuple(self.layer_letters)
        check_family(self, type(self).__module__)
        self.config_rows = tuple(map(ConfigRow.of, self.config))
        self.refusals: tuple[Refusal | Equality, ...] = (
            *(Refusal(*row) for row in self.refused),
            *(Equality(*row) for row in self.equal),
        )
        self.has_experts = "E" in self.symbols
        self.latent = bool(self.megatron.get("multi_latent_attention"))
        self.local_names = LOCAL_NAMES_LATENT if self.latent else LOCAL_NAMES
        self.megatron = MEGATRON | (MEGATRON_MOE if self.has_experts else {}) | self.megatron
        tables = {"model": self.model, "layer": self.layer, "mtp": self.mtp}
        self.rows: dict[str, tuple[Row, ...]] = {
            block: read_rows(table, type(self).__module__, (*self.kind_words, *self.fields))
            for block, table in tables.items()
        }

    @cached_property
    def fields(self) -> frozenset[str]:
        """The config fields that a row or a rule reads."""
        rows = {spelling for row in self.config_rows for spelling in row.spellings}
        refused = {name for refusal in self.refusals for name in refusal.fields}
        rules = {
            *MAPPED,
            *self.reads,
            *(WINDOW if self.window else ()),
            *(PATTERN_FIELDS if self.layer_letters else ()),
            *filter(None, (self.first_dense, self.mlp_types, self.shared_experts)),
        }
        return frozenset(rules | rows | refused | set(self.symbols.values()))

    @property
    def defaults(self) -> dict[str, Any]:
        """Fields that only transformers' class has, and its values for them."""
        if self.name not in DEFAULTS:
            raise ReshardError(
                f"reshard/models/config_defaults.py has no defaults for {self.name}: run "
                f"python -m tests.tools.config_defaults --write in the clone"
            )
        return DEFAULTS[self.name]

    def field_of(self, argument: str) -> str | None:
        """Return the config field for an argument of Megatron's, or None."""
        return next((row.field for row in self.config_rows if row.argument == argument), None)

    def has_no_effect(self, name: str) -> bool:
        """Return True for a field that changes nothing of what the weights compute. One with a
        leading underscore is transformers' own."""
        return name.startswith("_") or name.endswith(NO_EFFECT_ENDS) or name in (*NO_EFFECT, *self.no_effect)

    # A config

    def as_published(self, config: dict[str, Any]) -> dict[str, Any]:
        """Undo what an engine's model class changed in a config: vLLM's latent attention renames
        the rope type in place."""
        rope = config.get("rope_parameters") or {}
        kind = str(rope.get("rope_type", "")).removeprefix("deepseek_")
        return config | ({"rope_parameters": rope | {"rope_type": kind}} if self.latent and kind else {})

    def implied_fields(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Return fields with the values that others of a config imply; they count where it lacks them."""
        return {"num_hidden_layers": len(kinds_by_pattern(config, where))} if self.layer_letters else {}

    def layer_kinds(self, config: dict[str, Any], where: str) -> tuple[str, ...]:
        """Return the kind of each decoder layer: some of `kind_words`, with spaces between. Raises
        ReshardError where a field does not say which."""
        if self.layer_letters:
            return kinds_by_pattern(config, where)
        layers = int(config["num_hidden_layers"])
        if not self.first_dense:
            return ("moe" if self.has_experts else "dense",) * layers
        first = config.get(self.first_dense)
        if first is None:
            raise ReshardError(f"{where} has no field {self.first_dense}, which {self.architecture} needs")
        if not whole_number(first, 0):
            raise ReshardError(f"{where}: {self.first_dense} is {first!r:.80}, which is not a whole number")
        types = config.get(self.mlp_types) if self.mlp_types else None
        if types is not None and types != self._types(first, layers):
            raise ReshardError(
                f"{where}: {self.mlp_types}, which transformers reads, says something else than {self.first_dense} = "
                f"{first}, which engines read: correct the one that is wrong"
            )
        return tuple("dense" if layer < first else "moe" for layer in range(layers))

    @staticmethod
    def _types(first: int, layers: int) -> list[str]:
        """Return `mlp_types` of a model whose first layers are dense."""
        return ["dense"] * min(first, layers) + ["sparse"] * max(layers - first, 0)

    def mtp_kinds(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds of the decoder layers in a multi-token-prediction layer, after decoder
        layers of these kinds."""
        return kinds[-1:]

    def kinds_as_fields(self, pattern: list[int]) -> dict[str, Any]:
        """Return the config fields for a pattern with 1 for each layer with experts and 0 for each
        without: the inverse of `layer_kinds`."""
        if not self.first_dense:
            return {}
        first = pattern.index(1)
        types = {self.mlp_types: self._types(first, len(pattern))} if self.mlp_types else {}
        return {self.first_dense: first, **types}

    def window_of(self, config: dict[str, Any]) -> str:
        """Return the fields that make a layer attend to a window only, with their values; empty if none
        does.

        What is absent is what transformers' classes have then: a window of 4096 tokens, from layer 28 on.
        """
        if not self.window:
            return ""
        everywhere, types = self.window == "everywhere", config.get("layer_types")
        first = 0 if everywhere else config.get("max_window_layers", 28)
        slides = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
        slides = slides and (not whole_number(first, 0) or first < config["num_hidden_layers"])
        if types is not None:
            full = isinstance(types, list) and all(kind == "full_attention" for kind in types)
            slides = not full or (slides and everywhere)
        values = (f"{name} = {config[name]!s:.80}" for name in WINDOW if config.get(name) is not None)
        return listed(values, len(WINDOW)) if slides else ""

    def rope(self, config: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
        """Return the rotary settings of a config, see `rope_of`. The sections of positions of a
        model that reads images too are left out: of text all are the same."""
        share = 1.0 if self.partial_rotary is None else self.partial_rotary
        settings = rope_of(config, where, share, self.rope_theta)
        return {name: value for name, value in settings.items() if not name.startswith("mrope_")}

    def share_as_fields(self, share: float, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config fields for the share of a head's dims that turn."""
        return {"partial_rotary_factor": share}

    def name_in_memory(self, published: str) -> str:
        """Return the name in a transformers model of what has this published name, but for those of
        `in_memory`."""
        prefix, in_memory = self.in_memory_prefix
        return in_memory + published.removeprefix(prefix) if published.startswith(prefix) else published

    def published_module(self, module: str) -> str:
        """Return the published name of a module of a layer, which a transformers model may have
        under another."""
        for published, in_memory in self.in_memory:
            if in_memory.startswith(f"{module}."):
                return published.partition(".")[0]
        return module

    # Megatron's arguments

    def rope_args(self, config: dict[str, Any], where: str) -> dict[str, Any]:
        """Return Megatron's rotary arguments, of attention without positions none. Raises ReshardError,
        naming the field, where Megatron has no setting for it."""
        if self.megatron["position_embedding_type"] == "none":
            return {}
        rope = self.rope(config, where)
        share = rope["partial_rotary_factor"]
        if share != 1.0 and self.partial_rotary is None:
            raise ReshardError(f"{where}: partial_rotary_factor {share} is not supported, only 1.0")
        if rope["rope_type"] not in self.rope_types:
            name, known = rope["rope_type"], listed(self.rope_types)
            spelled = config.get("rope_parameters") or config.get("rope_scaling") or {}
            scaling = [key for key in spelled if key not in ("rope_theta", "partial_rotary_factor")]
            same = ", which up to max_position_embeddings tokens is the same model" * (name == "dynamic")
            raise ReshardError(
                f"{where}: rope type {name!r:.60} has no counterpart in Megatron for this "
                f"family, which has {known}; {ignore_hint(scaling)} goes on without it{same}"
            )
        return megatron_rope(rope, self.latent, where)

    def derived_args(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return arguments of Megatron's that follow from several fields, or that no row names.

        Latent attention does not use ``kv_channels``; without it Megatron derives one that
        --use-checkpoint-args lacks.
        """
        return {"kv_channels": config["v_head_dim"]} if self.latent else {}

    def args_as_fields(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the config fields for arguments of `derived_args`, or for a pattern, that say something of
        the model."""
        return pattern_fields(args) if self.layer_letters else {}

    def different_fields(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the fields by which two configs make two models, with both values, where no Megatron argument says
        which fields decide: of a family with Megatron's names `reshard.models.model.different_fields` does."""
        raise NotImplementedError

    def caveats(self, config: dict[str, Any], transformer_impl: str) -> list[str]:
        """Return a sentence for each thing that Megatron computes differently for this family alone."""
        if not self.latent:
            return []
        epsilon = config["rms_norm_eps"]
        norm = (
            "Megatron-Core 0.19 puts a norm before linear_q_proj without q_lora_rank; load this into layers "
            "that lack it"
        )
        compressed = f"transformers norms compressed keys with 1e-06, Megatron and vLLM with {epsilon}"
        extra_norm = not config["q_lora_rank"] and transformer_impl == "transformer_engine"
        return [norm] * extra_norm + [compressed] * (not same_value(epsilon, 1e-6))


@cache
def families() -> dict[str, Family]:
    """Return all families, by name. Raises ValueError if a mapping file has none, its rows do not
    follow the columns, or two have one name."""
    package = importlib.import_module("reshard.mappings")
    by_name = {}
    for module in pkgutil.iter_modules(package.__path__):
        table = importlib.import_module(f"reshard.mappings.{module.name}")
        defined = [
            kind
            for kind in vars(table).values()
            if isinstance(kind, type) and kind.__module__ == table.__name__
        ]
        if len(defined) != 1 or not issubclass(defined[0], Family):
            raise ValueError(f"mappings/{module.name}.py should define one Family")
        family = defined[0]()
        if family.name in by_name:
            raise ValueError(f"mappings/{module.name}.py: another file has the name {family.name!r} too")
        by_name[family.name] = family
    return by_name


def is_wrapped(family: Family, config: dict) -> bool:
    """Return True for the config of a model that has one of this family as its language model."""
    names, (architecture, kind) = architectures(config), family.wrapped_in
    known = {architecture, family.wrapped_class or architecture}
    return bool(architecture) and (
        not known.isdisjoint(names) or (not names and config.get("model_type") == kind)
    )


def architectures(config: dict) -> list[str]:
    """Return the model classes that a config names. FSDP2 calls its own ``FSDP`` and the model's, which
    trainers save with the config."""
    return [str(name).removeprefix("FSDP") for name in (config.get("architectures") or [])]


def with_model_classes(raw: bytes) -> bytes:
    """Return a ``config.json`` that names `architectures`, which engines know; the same bytes if it does already."""
    config = json.loads(raw)
    named = architectures(config)
    if named == (config.get("architectures") or []):
        return raw
    return (json.dumps(config | {"architectures": named}, indent=2) + "\n").encode()


def _is_architecture(family: Family, names: list[str]) -> bool:
    """Return True if one of these classes is the family's, or the same without an output layer, as a base
    model is saved: whether the output layer is the embedding, or lacking, shows in the files."""
    base = "TextModel" if family.name.endswith("_text") else "Model"
    known = {family.architecture.lower(), family.architecture.replace("ForCausalLM", base).lower()}
    return any(name.lower() in known for name in names)  # LLaMAForCausalLM, in the first conversions


def no_table(family: Family) -> ReshardError:
    """Return the error where a model without a mapping table would have to be Megatron's."""
    return ReshardError(
        family.refused_by_table
        or f"no mapping table covers {family.architecture}, so where its weights lie in a Megatron model is not known: "
        f"train it with FSDP2, or add a table ('Add a family' in CONTRIBUTING.md says how)"
    )


def has_table(config: dict) -> bool:
    """Return True if a mapping table covers a Hugging Face config, or it says of no model which it is."""
    names, kind = architectures(config), config.get("model_type")
    return not (names or kind) or any(_covers(family, config, names, kind) for family in families().values())


def _covers(family: Family, config: dict, names: list[str], kind: Any) -> bool:
    known = not names and kind in (family.name, *family.model_types)
    return is_wrapped(family, config) or _is_architecture(family, names) or known


def family_of(config: dict, where: str) -> Family:
    """Return the family of a Hugging Face config. Raises ReshardError, naming those that there are,
    where no table covers it."""
    names, kind = architectures(config), config.get("model_type")
    for family in families().values():
        if _covers(family, config, names, kind):
            wrapped, kinds = is_wrapped(family, config), (family.name, *family.model_types)
            if kind not in (None, "", *kinds, *(family.wrapped_in[1:] if wrapped else ())):
                # An empty one is of a config that an engine has made of another format.
                raise ReshardError(
                    f"{where}: model_type is {kind!r:.80}, but architectures names {names[0]}, "
                    f"which is a {family.name}: correct the one that is wrong"
                )
            return family
    wanted = " ".join(str(names[0] if names else config.get("model_type") or "").split())[:100]
    known = {n for family in families().values() for n in (family.architecture, family.wrapped_in[0]) if n}
    if not wanted:
        raise ReshardError(
            f"{where} names neither architectures nor model_type; the known ones are {listed(sorted(known))}"
        )
    raise ReshardError(
        f"{where}: {wanted} is not supported; the architectures that are: {listed(sorted(known), len(known))} "
        f"('Add a family' in CONTRIBUTING.md says how to add one)"
    )
