"""Megatron-LM's arguments of a model, and the model that arguments describe.

``args`` are Megatron-LM's arguments by name, as its checkpoints hold them. `megatron_args` makes them from a
model, `model_of_args` makes a model from them, `check_args` compares the two.
"""

from typing import Any

from reshard.core.dtypes import Dtype
from reshard.core.errors import OptionError, ReshardError, listed
from reshard.formats.pickles import Name
from reshard.megatron.hybrid import (
    as_gpt_args,
    as_hybrid_args,
    class_of,
    layer_pattern,
    letters_of,
    notices,
)
from reshard.megatron.layout import MegatronLayout
from reshard.models.config_fields import ignore_hint, ignored
from reshard.models.config_reading import MAX_LAYERS
from reshard.models.family import Family, families, no_table
from reshard.models.model import Model, has_experts
from reshard.models.numerics_args import (
    DERIVED,
    NUMERICS_ARGS,
    as_named_now,
    disagreements,
    moe_pattern,
)
from reshard.models.rope import MLA_YARN, hf_rope

# Values for which Megatron leaves the argument out, where the config has a number.
LEFT_OUT = {
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0,
}
# Tokens of a training sequence, at most: a run chooses them, not the model.
TRAINING_LENGTH = 4096
ADVICE = "pass --hf-config with the model's config.json"


def megatron_args(model: Model) -> dict[str, Any]:
    """Return Megatron-LM's arguments for a model, without parallel sizes."""
    family = model.family
    if not family.has_megatron_names:
        raise no_table(family)
    args = dict(family.megatron)
    for row in family.config_rows:
        arg, value = row.argument, model.config[row.field]
        if value is not None and not (arg in LEFT_OUT and value == LEFT_OUT[arg]):
            args[arg] = not value if row.relation == "not" else value
    args |= family.rope_args(model.config, model.where)
    if args.get("rope_type") == "rope" or args["position_embedding_type"] == "yarn":
        args["apply_rope_fusion"] = False  # Megatron's fused rotary embeddings lack it
    args["seq_length"] = min(args["max_position_embeddings"], TRAINING_LENGTH)
    args |= {"hidden_dropout": 0.0, "attention_softmax_in_fp32": True}
    if args["group_query_attention"] and args["num_query_groups"] == args["num_attention_heads"]:
        args["group_query_attention"] = False
    if model.num_experts:
        pattern = [int(has_experts(kind)) for kind in model.kinds]
        args["moe_layer_freq"] = 1 if all(pattern) else pattern
        if model.shared_width and family.shared_experts:
            args["moe_shared_expert_intermediate_size"] = model.shared_width
    else:
        args = {
            arg: value for arg, value in args.items() if arg != "num_experts" and not arg.startswith("moe_")
        }
    if family.layer_letters:
        args.pop("moe_layer_freq", None)
        args["hybrid_layer_pattern"] = "".join(letters_of(model, kind) for kind in model.kinds)
    args.pop("mtp_num_layers", None)
    if model.mtp_layers:
        args["mtp_num_layers"] = model.mtp_layers
    return args | family.derived_args(model.config)


def arguments(
    model: Model,
    layout: MegatronLayout,
    padded_vocab: int,
    make_vocab_size_divisible_by: int,
    dtype: Dtype,
    transformer_impl: str,
    model_class: str | None = None,
) -> dict[str, Any]:
    """Return all arguments that describe a model in a layout, in Megatron's `model_class`
    (`reshard.megatron.hybrid.class_of`). `padded_vocab` is Megatron's number of vocabulary rows."""
    args = megatron_args(model) | layout.megatron_args()
    args |= {
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "padded_vocab_size": padded_vocab,
        "transformer_impl": transformer_impl,
        "bf16": dtype.name == "bfloat16",
        "fp16": dtype.name == "float16",
    }
    if not model.num_experts:
        args.pop("expert_tensor_parallel_size")
    # Without it Megatron refuses to train experts with TP; its local layers cannot do it.
    args["sequence_parallel"] = bool(model.num_experts) and layout.tp > 1 and transformer_impl != "local"
    if transformer_impl == "local":
        args["moe_grouped_gemm"] = False
        if args.get("activation_func_clamp_value"):
            args["bias_gelu_fusion"] = False  # which clamps before it adds the bias that these layers pass on
    if class_of(model, model_class) == "hybrid":
        args = as_hybrid_args(args, layer_pattern(model, layout.stages(model)), transformer_impl)
    return args


def checkpoint_args(args: dict[str, Any], world_size: int, dtype: Dtype, iteration: int) -> dict[str, Any]:
    """Return the ``args`` that a training run with these arguments would have saved, as far as loading reads
    them."""
    per_model = args["tensor_model_parallel_size"] * args["pipeline_model_parallel_size"]
    return args | {
        "params_dtype": Name("torch", dtype.name),
        "world_size": world_size,
        "data_parallel_size": world_size // per_model,
        "add_position_embedding": True,
        "iteration": iteration,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
        "no_save_optim": True,
        "no_save_rng": True,
    }


def caveats(model: Model, transformer_impl: str, model_class: str | None = None) -> list[str]:
    """Return a sentence for each thing that Megatron-Core 0.19 computes differently with the same weights, or
    that its command line cannot say."""
    model_class = class_of(model, model_class)
    args, sentences = megatron_args(model), notices(model, model_class)
    if model_class == "hybrid" and "spec" in args:
        sentences.append(
            f"Megatron-LM has no --spec for the layers of {model.family.name} in a HybridModel: build it with "
            f"reshard.megatron.build.build_megatron"
        )
    groups_taken, groups = args.get("moe_router_group_topk"), args.get("moe_router_num_groups")
    if groups_taken and groups_taken != groups and args["moe_router_topk"] // groups_taken != 2:
        sentences.append(
            f"Megatron ranks a group of experts by its best {args['moe_router_topk'] // groups_taken}, this model "
            f"by its best 2: routing may differ"
        )
    without_flag = [name for name in MLA_YARN if name in args]
    if without_flag:
        values = listed(f"{name} {args[name]}" for name in without_flag)
        sentences.append(
            f"Megatron-LM has no flag for {values} of the rotary embedding: set it in the trainer's config"
        )
    return sentences + model.family.caveats(model.config, transformer_impl)


def check_args(model: Model, args: dict[str, Any], where: str, advice: str) -> None:
    """Raise ReshardError, naming both values, if Megatron's arguments make another model than this one.

    `args` may be a GPTModel's or a HybridModel's, and also the fields of a config by the same
    names. Arguments that are absent are not compared.
    """
    try:
        args = as_gpt_args(args, where)
        different = disagreements(args, megatron_args(model)) + _more_tokens(args, model)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ReshardError(
            f"{where} cannot be read as a model's ({type(error).__name__}: {error})"
        ) from error
    wrong = []
    for name, theirs, ours in different:
        if name in ignored():
            model.ignored[name] = f"{where}: {name} = {theirs!r:.80} is ignored; {ours!r:.80} is used"
        else:
            wrong.append((name, theirs, ours))
    if not wrong:
        return
    values = listed((f"{name} is {theirs!r} (not {ours!r})" for name, theirs, ours in wrong), len(wrong))
    other = f"{model.family.name} models here" if where == model.where else model.where
    them = "it" if len(wrong) == 1 else "them"
    with model.objecting():
        raise ReshardError(
            f"{where}: {values}, which makes another model of the weights than {other}: "
            f"{advice}; {ignore_hint([name for name, *_ in wrong])} goes on without {them}"
        )


def _more_tokens(args: dict[str, Any], model: Model) -> list[tuple[str, Any, Any]]:
    """Return ``vocab_size``, with both values, where a training had more tokens than the model: their rows would be
    taken for padding. A tokenizer often has fewer than there are rows."""
    tokens, rows = args.get("vocab_size"), model.symbols["V"]
    more = isinstance(tokens, int) and tokens > rows
    return [("vocab_size", tokens, rows)] if more else []


def check_family(name: str) -> None:
    """Raise OptionError if no family has this name."""
    if name not in families():
        raise OptionError(f"--family {name} is not one of {listed(sorted(families()), 40)}")


def model_of_args(args: dict[str, Any], where: str, family_name: str | None = None) -> Model:
    """Return the model that arguments describe: the inverse of `megatron_args`.

    They may be a GPTModel's or a HybridModel's. Raises ReshardError if an argument is missing or
    has a value that the family's models never have.
    """
    try:
        args = as_named_now(as_gpt_args(args, where))
        if family_name is not None:
            check_family(family_name)
        family = families()[family_name] if family_name else family_of_args(args, where)
        if int(args.get("num_layers") or 0) > MAX_LAYERS:
            raise ReshardError(f"{where}: num_layers is above {MAX_LAYERS:,}, which no model's is")
        model = Model.from_hf(hf_config_of_args(family, args, where), where)
        check_args(model, args, where, ADVICE)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ReshardError(f"{where} cannot be read as a model's ({reason}): {ADVICE}") from error
    return model


def hf_config_of_args(family: Family, args: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the Hugging Face config of a family that arguments describe.

    An absent argument is at Megatron's default. Raises ReshardError if that says nothing of the model.
    """
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **({"hidden_act": "silu"} if "hidden_act" in family.fields else {}),
        **family.hf,
    }
    if args.get("add_bias_linear"):  # which sets add_qkv_bias too
        args = args | {"add_qkv_bias": family.megatron["add_qkv_bias"]}
    for row in family.config_rows:
        arg = row.argument
        value = args.get(arg)
        value = LEFT_OUT.get(arg) if value is None else value
        if arg == "num_query_groups" and not args.get("group_query_attention"):
            value = args.get("num_attention_heads")
        if arg == "moe_aux_loss_coeff" and isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if value is None and row.needed and arg != "num_experts":
            raise ReshardError(f"{where} has no {arg}, which {family.name} needs: {ADVICE}")
        if value is None and NUMERICS_ARGS.get(arg) is not DERIVED:
            value = NUMERICS_ARGS.get(arg)
        if value is not None or row.relation == "not" or (row.default is None and not row.needed):
            config[row.field] = not value if row.relation == "not" else value
    if args.get("position_embedding_type") != "none":
        config |= hf_rope(args)
    if family.partial_rotary is not None:
        percent = args.get("rotary_percent")
        config |= family.share_as_fields(1.0 if percent is None else percent, config)
    if family.has_experts:
        pattern = moe_pattern(args.get("moe_layer_freq") or 1, int(args["num_layers"]))
        config |= family.kinds_as_fields(pattern)
    if family.shared_experts:
        width = args.get("moe_shared_expert_intermediate_size") or 0
        config[family.shared_experts] = width // int(args["moe_ffn_hidden_size"]) or None
    return config | family.args_as_fields(args)


def mismatched_args(family: Family, args: dict[str, Any]) -> list[str]:
    """Return the arguments whose values no model of this family has. An absent one is at Megatron's
    default."""
    if args.get("add_bias_linear"):  # which sets add_qkv_bias too
        args = args | {"add_qkv_bias": False}
    mismatched = []
    for name, expected in family.identifies.items():
        value = NUMERICS_ARGS[name] if args.get(name) is None else args[name]
        if (bool(value) if isinstance(expected, bool) else value) != expected:
            mismatched.append(name)
    return mismatched


def family_of_args(args: dict[str, Any], where: str) -> Family:
    """Return the one family whose models have such arguments. Raises ReshardError, naming them,
    if there is none or more than one."""
    identified = [family for family in families().values() if family.identifies]
    fitting = [family for family in identified if not mismatched_args(family, args)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ReshardError(
            f"{where} may be of {listed(family.name for family in fitting)}: {ADVICE}, or --family"
        )
    names = dict.fromkeys(name for family in families().values() for name in family.identifies)
    values = [
        f"{name} = {args.get(name)!r}"
        for name in names
        if args.get("num_experts") or not name.startswith("moe_")
    ]
    raise ReshardError(f"{where}: no family here has {listed(values, len(values))}; {ADVICE}")
