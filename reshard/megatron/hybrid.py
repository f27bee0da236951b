"""Megatron-Core's two classes of language models: how a ``HybridModel`` (formerly ``MambaModel``)
differs from a ``GPTModel``, which it replaces.

A GPTModel has attention and MLP in one layer. A HybridModel has each in a layer of its own, and a
pattern with a letter for each of them: decoder layer 3 is layers 6 and 7.

| what                  | GPTModel                                  | HybridModel                               |
|-----------------------|-------------------------------------------|-------------------------------------------|
| attention of layer 3  | ``decoder.layers.3.self_attention.``      | ``decoder.layers.6.self_attention.``      |
| MLP of layer 3        | ``decoder.layers.3.mlp.``                 | ``decoder.layers.7.mlp.``                 |
| layers in checkpoints | stacked where all are of one kind         | always one by one                         |
| the final norm        | ``decoder.final_layernorm.``              | ``decoder.final_norm.``                   |
| MLP of an MTP layer   | ``mtp.layers.0.transformer_layer.mlp.``   | ``mtp.layers.0.mtp_model_layer.layers.1.mlp.`` |
| output layer          | no ``_extra_state``                       | ``output_layer._extra_state``             |
| ``num_layers``        | decoder layers                            | twice as many                             |
| kinds of layers       | ``moe_layer_freq``, and more              | letters of ``hybrid_layer_pattern``       |
| MTP layers            | ``mtp_num_layers``                        | parts of the pattern after ``/``          |
| pipeline stages       | sizes, or a layout string                 | parts of the pattern between ``|``        |

Patterns in which attention and MLP alternate are decoder layers that a GPTModel has too. Those with
Mamba layers (``M``) are of models that no GPTModel is, of which every letter is a decoder layer
(`Family.layer_letters`). All others are refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.megatron.stages import Stage, shortened
from reshard.models.model import Model, has_experts

MODEL_CLASSES = ("gpt", "hybrid")
FINAL_NORM = "decoder.final_norm.weight"
# Letters of a pattern.
ATTENTION = {"*": "attention", "+": "latent attention", "D": "sparse attention", "G": "linear attention"}
MLP = {"-": "a dense MLP", "E": "experts"}
MAMBA, STAGE, MTP = "M", "|", "/"
# The layers in an MTP layer of models with Mamba layers.
MTP_OF_MAMBA = "*E"
# Arguments with a pattern, of which the second is the older name.
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# Modules of Megatron-Core and of reshard with specs of the layers of a HybridModel.
SPECS = ("megatron.core.models.hybrid.", "megatron.core.models.mamba.", "reshard.megatron.")
STACK_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
# Arguments of a GPTModel that a pattern stands for.
IN_PATTERN = (
    "moe_layer_freq",
    "linear_attention_freq",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# Arguments of a HybridModel that say what others say of a GPTModel, or that it does not read.
OF_HYBRID = (
    *PATTERNS,
    "mtp_hybrid_override_pattern",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "is_hybrid_model",
    "moe_layer_freq",
    "linear_attention_freq",
)


def class_of_keys(keys: Iterable[str]) -> str:
    """Return the class of the model that a whole checkpoint with these keys is of: ``gpt`` or ``hybrid``."""
    return "hybrid" if FINAL_NORM in keys else "gpt"


def class_of_models(models: Iterable[Any]) -> str:
    """Return the class of a live model's chunks: ``gpt`` or ``hybrid``."""
    return "hybrid" if any(map(pattern_of, models)) else "gpt"


def pattern_of(model: Any) -> str | None:
    """Return the pattern of a live chunk; None for a GPTModel."""
    patterns = (getattr(model, name, None) for name in PATTERNS)
    return next((pattern for pattern in patterns if isinstance(pattern, str)), None)


def class_of(model: Model, model_class: str | None = None) -> str:
    """Return the class that a model is built and written as: the one that was asked for, else
    ``gpt`` where a GPTModel has such layers, and ``hybrid`` where none has.

    Raises ReshardError for an unknown class, and for one that has no such layers.
    """
    only_hybrid = bool(model.family.layer_letters)
    if model_class is None:
        return "hybrid" if only_hybrid else "gpt"
    if model_class not in MODEL_CLASSES:
        raise ReshardError(
            f"model_class is {model_class!r:.80}, which is not one of {', '.join(MODEL_CLASSES)}"
        )
    if model_class == "gpt" and only_hybrid:
        raise ReshardError(
            f"{model.where}: Megatron-Core's GPTModel has no Mamba layers: leave --model-class (model_class=) out, "
            f"or say hybrid"
        )
    return model_class


def check_model_class(model: Model, model_class: str) -> None:
    """Raise ReshardError if Megatron-Core's HybridModel does not compute what the model does."""
    lacking = _lacking(model)
    if model_class == "hybrid" and lacking:
        raise ReshardError(f"{model.where}: Megatron-Core's HybridModel has no {lacking}: build a GPTModel")


def notices(model: Model, model_class: str) -> list[str]:
    """Return a sentence for what a HybridModel of Megatron-Core up to 0.20 does not compute as the model is
    published."""
    lacking = _lacking(model)
    if model_class == "hybrid" and lacking:
        return [f"a HybridModel trains without the config's {lacking}, which it has no option for"]
    return []


def _lacking(model: Model) -> str:
    """Return what a HybridModel lacks of the model's rotary embeddings: the scaling of Llama 3.1, or angles for
    neighboring dims; empty if it has all."""
    if model.family.megatron["rotary_interleaved"]:
        return "rotary embeddings of neighboring dims"
    return "llama3 scaling of rotary embeddings" if model.rope()["rope_type"] == "llama3" else ""


def letters_of(model: Model, kind: str) -> str:
    """Return the letters of a decoder layer of this kind."""
    family = model.family
    if family.layer_letters:
        return family.layer_letters[kind]
    sparse = family.megatron.get("experimental_attention_variant") == "dsa"
    attention = "D" if sparse else "+" if family.latent else "*"
    return ("G" if "linear" in kind.split() else attention) + ("E" if has_experts(kind) else "-")


def layer_pattern(model: Model, stages: list[list[Stage]]) -> str:
    """Return the pattern of the HybridModel that a model is, with these stages as ``[pp
    rank][virtual stage]``."""
    virtual = [[rank[index] for rank in stages] for index in range(len(stages[0]))]
    segments = (
        "".join(letters_of(model, model.kinds[layer]) for layer in stage.layers)
        for ranks in virtual
        for stage in ranks
    )
    mtp = MTP + "".join(letters_of(model, kind) for kind in model.mtp_kinds)
    return STAGE.join(segments) + mtp * model.mtp_layers


def as_hybrid_args(args: Mapping[str, Any], pattern: str, transformer_impl: str) -> dict[str, Any]:
    """Return the arguments of the HybridModel that computes what a GPTModel with these does: the inverse of
    `as_gpt_args`."""
    if args.get("dsa_indexer_topk_freq") not in (None, 1):
        raise ReshardError(
            "layers that share an indexer are counted otherwise in a HybridModel, which is not supported: "
            "use a GPTModel"
        )
    if args.get("window_attn_skip_freq") is not None:
        raise ReshardError(
            "layers with a window among others are counted otherwise in a HybridModel, which is not supported: use a "
            "GPTModel"
        )
    hybrid = {name: value for name, value in args.items() if name not in IN_PATTERN}
    if hybrid.get("experimental_attention_variant") == "gated_delta_net":
        del hybrid["experimental_attention_variant"]
    decoder = pattern.split(MTP)[0].replace(STAGE, "")
    hybrid |= {"num_layers": len(decoder), "hybrid_layer_pattern": pattern}
    if hybrid.pop("spec", None) is None and transformer_impl == "transformer_engine":
        hybrid["spec"] = STACK_SPEC
    return hybrid


def stages_of_pattern(pattern: str, pp: int) -> dict[str, Any]:
    """Return the options of a `MegatronLayout` for the stages of a pattern, on `pp` ranks.

    Raises ReshardError if a stage ends between an attention and its MLP, or the pattern does not
    say where it ends.
    """
    decoder, *mtp = pattern.split(MTP)
    segments = decoder.split(STAGE)
    if len(segments) == 1 and pp > 1:  # deprecated: an even split
        each = max(len(decoder) // pp, 1)
        segments = [decoder[i : i + each] for i in range(0, len(decoder), each)]
    if len(segments) % pp:
        raise ReshardError(f"the pattern {shortened(pattern)} has no {pp} stages: pass layout=")
    letters = 1 if MAMBA in decoder else 2  # of a decoder layer
    if any(len(segment) % letters for segment in segments):
        raise ReshardError(
            f"in the pattern {shortened(pattern)} a pipeline stage ends between an attention and its MLP: pass layout="
        )
    counts = [len(segment) // letters for segment in segments]
    if len(set(counts)) == 1:
        return {"vpp": len(counts) // pp}
    rows = ["t" * count for count in counts]
    rows[0], rows[-1] = f"E{rows[0]}", f"{rows[-1]}{'m' * len(mtp)}L"
    return {"pipeline_model_parallel_layout": STAGE.join(rows)}


def hybrid_name(prefix: str, layer: int | None, name: str, halves: bool = True) -> tuple[str, str]:
    """Return prefix and name in a HybridModel of a parameter that a GPTModel has as
    ``{prefix}{layer}.{name}``; without `halves` a decoder layer is one of the HybridModel's.

    >>> hybrid_name("decoder.layers.", 3, "mlp.linear_fc1.weight")
    ('decoder.layers.7.', 'mlp.linear_fc1.weight')
    """
    of_mlp = int(name.startswith(("mlp.", "pre_mlp_layernorm.")))
    if prefix == "decoder.layers." and not halves:
        return f"{prefix}{layer}.", name
    if prefix == "decoder.layers.":
        return f"{prefix}{2 * (layer or 0) + of_mlp}.", name
    if prefix.endswith(".transformer_layer."):
        return f"{prefix.removesuffix('transformer_layer.')}mtp_model_layer.layers.{of_mlp}.", name
    return prefix, name.replace("decoder.final_layernorm.", "decoder.final_norm.")


def pairs(pattern: str, where: object) -> list[str]:
    """Return the letters of each decoder layer, an attention and an MLP, of a pattern without stages
    and MTP layers.

    Raises ReshardError if attention and MLP do not alternate.

    >>> pairs("*-*E", "args")
    ['*-', '*E']
    """
    layers = [pattern[i : i + 2] for i in range(0, len(pattern), 2)]
    if not layers or not all(len(pair) == 2 and pair[0] in ATTENTION and pair[1] in MLP for pair in layers):
        raise ReshardError(
            f"{where}: in the pattern {shortened(pattern)} attention ({' '.join(ATTENTION)}) and MLP "
            f"({' '.join(MLP)}) do not alternate, as they do in the models of all families here"
        )
    return layers


def as_gpt_args(args: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return the arguments of the GPTModel that computes what a HybridModel with these does; those
    of a GPTModel as they are. With Mamba layers, which no GPTModel has, the pattern stays among them, without
    stages and MTP layers.

    Raises ReshardError if there is none.
    """
    pattern = next((args[name] for name in PATTERNS if args.get(name)), None)
    if pattern is None:
        return dict(args)
    if not isinstance(pattern, str):
        raise ReshardError(f"{where}: hybrid_layer_pattern is {pattern!r:.80}, which is not a pattern")
    decoder, *parts = pattern.split(MTP)
    mtp = [inside for inside in parts if inside]
    mtp_layers = len(mtp)
    if not mtp and args.get("mtp_hybrid_override_pattern"):
        mtp, mtp_layers = [args["mtp_hybrid_override_pattern"]], int(args.get("mtp_num_layers") or 0)
    gpt = {name: value for name, value in args.items() if name not in OF_HYBRID}
    spec = args.get("spec")
    if isinstance(spec, (list, tuple)) and spec and f"{spec[0]}.".startswith(SPECS):
        del gpt["spec"]
    if "[" in pattern:
        raise ReshardError(
            f"{where}: the pattern {shortened(pattern)} groups layers in brackets, which is not read: train "
            "without them"
        )
    decoder = decoder.replace(STAGE, "")
    if MAMBA in decoder:
        if set(mtp) - {MTP_OF_MAMBA}:
            raise ReshardError(
                f"{where}: an MTP layer of the pattern {shortened(pattern)} is not {MTP_OF_MAMBA}, as in "
                "all published models"
            )
        gpt |= {"num_layers": len(decoder), "hybrid_layer_pattern": decoder}
        return gpt | ({"mtp_num_layers": mtp_layers} if mtp else {})
    layers = pairs(decoder, where)
    if any(len(pairs(inside, where)) != 1 for inside in set(mtp)):
        raise ReshardError(
            f"{where}: an MTP layer of the pattern {shortened(pattern)} is not one attention and one MLP"
        )
    gpt |= {"num_layers": len(layers)} | _kinds_as_args(layers)
    if mtp:
        gpt["mtp_num_layers"] = mtp_layers
    if gpt.get("experimental_attention_variant") == "dsa" and args.get("dsa_indexer_topk_freq") not in (
        None,
        1,
    ):
        raise ReshardError(
            f"{where}: dsa_indexer_topk_freq {args['dsa_indexer_topk_freq']} counts the layers of a HybridModel, which "
            f"is not read"
        )
    if args.get("window_size") and args.get("window_attn_skip_freq") is not None:
        raise ReshardError(
            f"{where}: window_attn_skip_freq {args['window_attn_skip_freq']} counts the layers of a HybridModel, which "
            f"is not read"
        )
    return gpt


def _kinds_as_args(layers: list[str]) -> dict[str, Any]:
    """Return the arguments of a GPTModel for the kinds of its layers, given their letters."""
    experts, attentions = [int(pair[1] == "E") for pair in layers], [pair[0] for pair in layers]
    args: dict[str, Any] = {"moe_layer_freq": experts} if any(experts) else {"num_experts": None}
    if "G" in attentions:
        linear = [int(attention == "G") for attention in attentions]
        args |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": linear}
    if "D" in attentions:
        args["experimental_attention_variant"] = "dsa"
    return args
