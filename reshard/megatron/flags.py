"""Megatron-LM's arguments as a command line, for each of its versions."""

import re
from typing import Any

from reshard.core.errors import OptionError, ReshardError
from reshard.models.rope import MLA_YARN

FLAGS_FILE = "megatron_flags.txt"

# Flags that are not spelled like the argument, or say the opposite.
SPELLINGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
}
WHEN_FALSE = {
    "add_bias_linear": "--disable-bias-linear", "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion", "apply_rope_fusion": "--no-rope-fusion",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
}  # fmt: skip
# The second is spelled --apply-layernorm-1p, an argument of its own.
NO_FLAG = {
    "context_parallel_size",
    "layernorm_zero_centered_gamma",
    "gtp_weight_remat_size",  # which follow from the numbers of shards
    "expert_gtp_weight_remat_size",
    *MLA_YARN,
}
# Versions of Megatron-LM, as (major, minor): those whose parsers are known, and since when they have an
# argument.
OLDEST, NEWEST = (0, 12), (0, 20)
PADDED_VOCAB_AND_ROPE_TYPE, PIPELINE_STRINGS, YARN_WITHOUT_MLA, INDEXER = (0, 14), (0, 13), (0, 19), (0, 19)
SINKS = (0, 19)
GTP = (0, 19)
# With latent attention among the letters of a pattern, and a loader of a GPTModel's checkpoints.
HYBRID = (0, 19)
# Before, multi-latent attention took max_position_embeddings for YaRN's original length, and mscale
# for the softmax too.
YARN_LENGTH = (0, 14)
# Without the path of its files: they move with the checkpoint, and a file in it cannot know where to.
TOKENIZER = "--tokenizer-type HuggingFaceTokenizer"


def version_of(text: str | None) -> tuple[int, int]:
    """Return ``0.14`` or ``0.14.2`` as (0, 14); None and newer versions give the newest known. Raises
    ReshardError for a version older than any known one, and for text that is not a version."""
    if text is None:
        return NEWEST
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\.\w+)*", text, re.ASCII)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        raise OptionError(
            f"--megatron-version {text} is not a version from {_dotted(OLDEST)} on, such as {_dotted(NEWEST)}"
        )
    return min(version, NEWEST)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def arguments_for(args: dict[str, Any], version: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments that make the same model in a version of Megatron-LM, which refuses
    those that it does not know.

    Raises ReshardError, naming the first version that can, where it has no arguments for the model or the
    layout.
    """

    def refuse(what: str, since: tuple[int, int]) -> ReshardError:
        return ReshardError(
            f"Megatron-LM {_dotted(version)} has no arguments for {what}: "
            f"{_dotted(since)} is the first that has; give --megatron-version "
            f"{_dotted(since)} and load it there"
        )

    if version < YARN_WITHOUT_MLA and args.get("position_embedding_type") == "yarn":
        raise refuse("YaRN without multi-latent attention", YARN_WITHOUT_MLA)
    if version < HYBRID and args.get("hybrid_layer_pattern") is not None:
        raise refuse("a HybridModel with the layers of this model", HYBRID)
    if version < INDEXER and args.get("experimental_attention_variant") == "dsa":
        raise refuse("attention to the tokens that an indexer chooses", INDEXER)
    if version < GTP and any(args.get(f"{kind}gtp_weight_remat_size") for kind in ("", "expert_")):
        raise refuse("generalized tensor parallelism", GTP)
    if version < SINKS and args.get("softmax_type") == "learnable":
        raise refuse("attention with sinks", SINKS)
    if (
        version < YARN_LENGTH
        and args.get("rope_type") == "yarn"
        and args.get("rotary_scaling_factor") not in (None, 1)
    ):
        length = args.get("original_max_position_embeddings", MLA_YARN["original_max_position_embeddings"])
        if length != args["max_position_embeddings"] or args.get("mscale") != args.get("mscale_all_dim"):
            raise refuse("this YaRN of multi-latent attention", YARN_LENGTH)
    if version < PIPELINE_STRINGS and args.get("pipeline_model_parallel_layout") is not None:
        raise refuse("pipeline layouts given as a string", PIPELINE_STRINGS)
    if version >= PADDED_VOCAB_AND_ROPE_TYPE:
        return args
    # The vocabulary's size and its divisor give the padded one. Multi-latent attention always has YaRN, which
    # at factor 1 is none.
    older = {name: value for name, value in args.items() if name not in ("padded_vocab_size", "rope_type")}
    return older | ({"rotary_scaling_factor": 1.0} if args.get("rope_type") == "rope" else {})


def command_line(
    args: dict[str, Any], version: tuple[int, int] = NEWEST, tokenizer: bool = True
) -> list[str]:
    """Return the flags of a version of Megatron-LM for these arguments, one ``--flag value`` an item.

    With `tokenizer` they name the one beside the checkpoint. Raises what `arguments_for` does.
    """
    args = arguments_for(args, version)
    flags = []
    implied = set(NO_FLAG)
    if args.get("pipeline_model_parallel_layout") is not None:
        implied.add("virtual_pipeline_model_parallel_size")
    if args.get("hybrid_layer_pattern") is not None:
        implied |= {"num_layers", "mtp_num_layers"}
    for name, value in args.items():
        flag = SPELLINGS.get(name, "--" + name.replace("_", "-"))
        if name in implied or value is None:
            continue
        if name == "num_query_groups" and not args.get("group_query_attention"):
            continue
        if isinstance(value, bool):
            if not value and name in WHEN_FALSE:
                flags.append(WHEN_FALSE[name])
            elif value and name not in WHEN_FALSE:
                flags.append(flag)
        elif name == "spec":  # a module, and a name in it
            flags.append(" ".join([flag, *value]))
        elif isinstance(value, tuple):
            flags.append(f"{flag} {','.join(map(str, value))}")
        elif isinstance(value, list):
            flags.append(f"{flag} [{','.join(map(str, value))}]")
        else:
            flags.append(f"{flag} {value}")
    return [*flags, TOKENIZER] if tokenizer else flags
