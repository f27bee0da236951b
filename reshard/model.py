"""A model as its Hugging Face config describes it: family, sizes, layer kinds; and the same in Megatron's arguments."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from reshard.errors import ReshardError, listed
from reshard.rope import hf_rope, megatron_rope
from reshard.tables import Family, Row, families, family_of, rows_that_hold, shape_of


@dataclass(frozen=True)
class Model:
    """What the tables need to know of a model.

    `config` is the Hugging Face config with the family's defaults filled in, `kinds` says ``dense`` or ``moe`` for each decoder
    layer, `mtp_layers` is the number of multi-token-prediction layers, `where` names the config in error messages.
    """

    family: Family
    config: dict[str, Any]
    kinds: tuple[str, ...]
    mtp_layers: int = 0
    where: str = field(default="config.json", compare=False)

    @staticmethod
    def from_hf(config: dict[str, Any], where: str = "config.json") -> "Model":
        """Read a Hugging Face config. Raises ReshardError for a missing field or a setting that Megatron cannot hold."""
        try:
            model = Model._read(config, where)
            model.megatron_args()  # so that what Megatron cannot hold is refused now
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ReshardError(f"{where} has a setting that cannot be read ({type(error).__name__}: {error})") from error
        return model

    @staticmethod
    def _read(config: dict[str, Any], where: str) -> "Model":
        family = family_of(config, where)
        full = dict(config)
        for name, aliases, _, _, default in config_rows(family):
            for alias in aliases:
                if full.get(name) is None and full.get(alias) is not None:
                    full[name] = full[alias]
            if full.get(name) is None:
                full[name] = _default(name, default, full, where)
        for name in (n for n, *_ in config_rows(family)):
            if type(full[name]) is str or isinstance(full[name], (list, dict)):
                raise ReshardError(f"{where}: {name} is {full[name]!r}, which is not a number")
        for name in ("num_hidden_layers", *family.table.SYMBOLS.values()):
            value = full.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise ReshardError(f"{where}: {name} is {value!r}, which is not a positive whole number")
        for name, allowed, why in family.table.REFUSED:
            a, unequal, b = name.partition(" != ")
            value = full.get(a) != full.get(b) if unequal else full.get(name, allowed[0])
            if value is not None and value not in allowed:
                raise ReshardError(f"{where}: {name}{'' if unequal else f' = {value}'} cannot be held by Megatron: {why}")
        return Model(family, full, _kinds(family, full, where), int(full.get("num_nextn_predict_layers") or 0), where)

    @property
    def num_layers(self) -> int:
        """Decoder layers, without those for multi-token prediction."""
        return len(self.kinds)

    @cached_property
    def symbols(self) -> dict[str, int]:
        """The family's SYMBOLS with this model's sizes."""
        values = {symbol: self.config.get(name) for symbol, name in self.family.table.SYMBOLS.items()}
        return {symbol: int(value) for symbol, value in values.items() if value is not None}

    def shape(self, expression: str) -> tuple[int, ...]:
        """The shape that a table's expression, such as ``NQ*D H``, stands for in this model."""
        found = self._shapes.get(expression)
        if found is None:
            found = self._shapes[expression] = shape_of(expression, self.symbols)
        return found

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    @cached_property
    def flags(self) -> frozenset[str]:
        """The conditions of table rows that hold for the whole model."""
        config = self.config
        tests = {
            "tied": config.get("tie_word_embeddings"), "untied": not config.get("tie_word_embeddings"),
            "attention_bias": config.get("attention_bias"), "mlp_bias": config.get("mlp_bias"),
            "q_lora": config.get("q_lora_rank"), "no_q_lora": not config.get("q_lora_rank"),
            "shared": config.get("n_shared_experts"),
        }  # fmt: skip
        return frozenset(name for name, holds in tests.items() if holds)

    @property
    def num_experts(self) -> int:
        """Routed experts in each MoE layer; 0 for a dense model."""
        return self.symbols.get("E", 0) if "moe" in self.kinds else 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the decoder layers that have experts."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind == "moe")

    @property
    def uniform(self) -> bool:
        """Whether all decoder layers are of one kind, so that Megatron stacks them under one name."""
        return len(set(self.kinds)) == 1

    def rows(self, block: str, kind: str = "") -> list[Row]:
        """The rows of a block (``model``, ``layer``, ``mtp``) that apply to a layer of this kind."""
        return rows_that_hold(getattr(self.family, block), set(self.flags) | {kind})

    def megatron_args(self) -> dict[str, Any]:
        """Megatron-LM's arguments for this model, by their names in ``args``; no parallel sizes."""
        table = self.family.table
        args: dict[str, Any] = dict(table.MEGATRON)
        for name, _, arg, relation, _ in config_rows(self.family):
            value = self.config[name]
            if value is not None:
                args[arg] = not value if relation == "not" else value
        if args.get("multi_latent_attention"):
            args["kv_channels"] = self.config[
                "v_head_dim"
            ]  # unused by MLA; without it Megatron derives one that --use-checkpoint-args lacks
        args |= megatron_rope(self.config, table.ROPE, self.where)
        if args.get("rope_type") == "rope":
            args["apply_rope_fusion"] = False  # Megatron's fused rotary embedding for MLA is for YaRN only
        args["seq_length"] = args["max_position_embeddings"]
        if args.get("group_query_attention") and args["num_query_groups"] == args["num_attention_heads"]:
            args["group_query_attention"] = False
        if "num_experts" in args:
            if not self.num_experts:
                args = {key: v for key, v in args.items() if key != "num_experts" and not key.startswith("moe_")}
            else:
                args["moe_layer_freq"] = 1 if self.uniform else [int(kind == "moe") for kind in self.kinds]
        if "shared" in self.flags and self.num_experts:
            args["moe_shared_expert_intermediate_size"] = self.symbols["NS"] * self.symbols["FE"]
        if self.mtp_layers:
            args["mtp_num_layers"] = self.mtp_layers
        else:
            args.pop("mtp_num_layers", None)
        return args

    def caveats(self, transformer_impl: str) -> list[str]:
        """Where Megatron-Core 0.19 computes something else from the same weights."""
        found, config = [], self.config
        if "kv_lora_rank" in config and "no_q_lora" in self.flags and transformer_impl == "transformer_engine":
            found.append("Megatron-Core 0.19 puts a norm before linear_q_proj without q_lora_rank; load this into layers that lack it")
        groups, experts = config.get("topk_group"), config.get("num_experts_per_tok")
        if groups and groups != config.get("n_group") and experts // groups != 2:
            found.append(f"Megatron ranks a group of experts by its best {experts // groups}, this model by its best 2: routing may differ")
        return found

    @staticmethod
    def from_megatron_args(args: dict[str, Any], where: str, family_name: str | None = None) -> "Model":
        """The inverse of `megatron_args`: the Hugging Face config that these arguments describe.

        Raises ReshardError where an argument is missing or has a value that the family's models never have.
        """
        try:
            return Model._from_args(args, where, family_name)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ReshardError(f"{where} cannot be read as a model's ({what}): pass --hf-config with the model's config.json") from error

    @staticmethod
    def _from_args(args: dict[str, Any], where: str, family_name: str | None) -> "Model":
        if family_name is not None and family_name not in families():
            raise ReshardError(f"--family {family_name} is not one of {listed(sorted(families()))}")
        family = families()[family_name] if family_name else _family_of_args(args, where)
        table = family.table
        config: dict[str, Any] = {"architectures": [family.architecture], **table.HF}
        if args.get("add_bias_linear"):
            args = args | {"add_qkv_bias": table.MEGATRON.get("add_qkv_bias", False)}  # Megatron sets it then, and it says nothing more
        for name, _, arg, relation, default in config_rows(family):
            value = args.get(arg)
            if name == "num_key_value_heads" and not args.get("group_query_attention"):
                value = args.get("num_attention_heads")
            if value is None and default == "needed" and arg != "num_experts":
                raise ReshardError(f"{where} has no {arg}, which {family.name} needs: pass --hf-config with the model's config.json")
            config[name] = not value if relation == "not" else value
        for arg, value in table.MEGATRON.items():
            constant = arg in ("normalization", "swiglu", "add_qkv_bias", "qk_layernorm", "multi_latent_attention",
                               "moe_router_score_function", "moe_router_enable_expert_bias")  # fmt: skip
            if constant and (not arg.startswith("moe_") or args.get("num_experts")) and args.get(arg, value) != value:
                raise ReshardError(f"{where}: {arg} = {args.get(arg)!r}, but {family.name} models have {value!r}")
        config |= hf_rope(args)
        frequency, layers = args.get("moe_layer_freq", 1), int(args["num_layers"])
        if isinstance(frequency, str):
            frequency = [int(n) for n in frequency.strip("[]").split(",")]
        pattern = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(layers)]
        if table.LAYER_KINDS == "sparse_step":
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, moe in enumerate(pattern) if not moe]}
        elif table.LAYER_KINDS == "first_dense":
            config["first_k_dense_replace"] = pattern.index(1)
            shared = args.get("moe_shared_expert_intermediate_size") or 0
            config["n_shared_experts"] = shared // int(args["moe_ffn_hidden_size"]) or None
        if config.get("num_nextn_predict_layers", 0) is None:
            config["num_nextn_predict_layers"] = 0
        return Model.from_hf(config, where)


def config_rows(family: Family) -> list[tuple[str, list[str], str, str, Any]]:
    """The CONFIG rows of a table: config field, other spellings of it, Megatron argument, relation, default."""
    return [(*_spelled(field), arg, relation, default) for field, arg, relation, default in family.table.CONFIG]


def _spelled(field: str) -> tuple[str, list[str]]:
    name, *aliases = field.split("|")
    return name, aliases


def _default(name: str, default: Any, config: dict[str, Any], where: str) -> Any:
    """The value of an absent field: a literal, another field, or the quotient of two."""
    if default == "needed":
        raise ReshardError(f"{where} has no field {name}, which {config.get('architectures', ['this model'])[0]} needs")
    if not isinstance(default, str):
        return default
    first, _, second = default.partition("/")
    return config[first] // config[second] if second else config[first]


def _kinds(family: Family, config: dict[str, Any], where: str) -> tuple[str, ...]:
    layers, rule = int(config["num_hidden_layers"]), family.table.LAYER_KINDS
    if rule == "dense":
        return ("dense",) * layers
    if rule == "first_dense":
        first = config.get("first_k_dense_replace")
        if first is None:
            raise ReshardError(f"{where} has no field first_k_dense_replace, which {family.architecture} needs")
        return tuple("dense" if i < first else "moe" for i in range(layers))
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return tuple("moe" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(layers))


def _family_of_args(args: dict[str, Any], where: str) -> Family:
    """The one family whose models have such arguments."""
    if args.get("multi_latent_attention"):
        name = "deepseek_v3"
    elif args.get("num_experts"):
        name = "qwen3_moe"
    elif args.get("qk_layernorm"):
        name = "qwen3"
    elif args.get("add_qkv_bias") and not args.get("add_bias_linear"):
        name = "qwen2"
    else:
        name = "llama"
    unknown = [key for key in ("squared_relu", "apply_layernorm_1p", "hybrid_layer_pattern", "moe_latent_size") if args.get(key)]
    if unknown:
        raise ReshardError(f"{where}: no family here has {listed(unknown)}; pass --hf-config with the model's config.json")
    return families()[name]
