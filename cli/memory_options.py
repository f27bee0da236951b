"""The options of ``reshard memory``, by subject. Megatron's own names work wherever it has one."""

from collections.abc import Callable
from typing import Any

import click

from reshard.cli.layout import engine_option
from reshard.core.limits import MAX_VOCAB_MULTIPLE


def _size(*names: str, **settings: Any) -> Callable:
    """Make an option that takes a number of at least one."""
    return click.option(*names, type=click.IntRange(min=1), **settings)


def _choice(*names: str, among: str, **settings: Any) -> Callable:
    """Make an option that takes one of several words."""
    return click.option(*names, type=click.Choice(among.split()), **settings)


_LAYOUT = (
    _size(
        "--cp", "--context-parallel-size", "cp", default=1, show_default=True, help="Context parallel size."
    ),
    _size(
        "--dp", "--data-parallel-size", "dp", help="Data parallel size (default: the least that EP needs)."
    ),
    _size("--gpus", "--world-size", "gpus", help="All GPUs of the trainer, instead of --dp."),
    _size("--gpus-per-host", default=8, show_default=True, help="GPUs of a host."),
    click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Default: with TP."),
    _choice(
        "--cp-comm-type",
        among="p2p a2a all_gather",
        default="p2p",
        show_default=True,
        help="How context parallelism communicates.",
    ),
    click.option(
        "--make-vocab-size-divisible-by",
        type=click.IntRange(1, MAX_VOCAB_MULTIPLE),
        default=128,
        show_default=True,
        help="Pad the vocabulary to a multiple of this times TP.",
    ),
)
_BATCH = (
    _size("--seq-length", default=4096, show_default=True, help="Tokens of a sequence."),
    _size("--micro-batch-size", default=1, show_default=True, help="Sequences of a microbatch."),
    _size("--num-microbatches", help="Microbatches of a step (default: four for each stage)."),
    _size("--global-batch-size", help="Sequences of a step, instead of --num-microbatches."),
    _size("--microbatch-group-size-per-vp-stage", "microbatch_group_size", help="With VPP (default: PP)."),
)
_ACTIVATIONS = (
    click.option(
        "--recompute",
        metavar="WHAT",
        help="none, full, uniform:N, block:N, or modules such as moe_act,layernorm.",
    ),
    _choice("--recompute-granularity", among="full selective", help="Megatron's, instead of --recompute."),
    _choice("--recompute-method", among="uniform block", help="With --recompute-granularity full."),
    _size("--recompute-num-layers", help="With --recompute-granularity full."),
    click.option("--recompute-modules", metavar="A,B", help="With --recompute-granularity selective."),
    click.option(
        "--imbalance", type=float, help="Tokens on the fullest expert rank, as a multiple of an even share."
    ),
    _choice(
        "--moe-token-dispatcher-type",
        "dispatcher",
        among="alltoall flex allgather",
        default="alltoall",
        show_default=True,
        help="How tokens go to experts.",
    ),
    click.option(
        "--overlap-moe-expert-parallel-comm",
        "overlap_expert_comm",
        is_flag=True,
        help="One more warm-up step.",
    ),
    _choice(
        "--cross-entropy-fusion-impl",
        "cross_entropy",
        among="native te none",
        default="native",
        show_default=True,
        help="Which loss is fused.",
    ),
    _choice("--fp8", "--fp8-recipe", "fp8", among="delayed tensorwise blockwise mxfp8", help="Train in fp8."),
)
_OPTIMIZER = (
    _choice(
        "--grads",
        among="fp32 bf16",
        default="fp32",
        show_default=True,
        help="Dtype in which gradients accumulate.",
    ),
    click.option(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=True,
        show_default=True,
        help="Split over data parallel ranks.",
    ),
    _size(
        "--num-distributed-optimizer-instances",
        "optimizer_instances",
        default=1,
        show_default=True,
        help="Instances of the distributed optimizer.",
    ),
    _choice(
        "--main-params",
        "--main-params-dtype",
        "main_params",
        among="fp32 fp16 int16",
        default="fp32",
        show_default=True,
        help="int16: the precision-aware optimizer's remainders.",
    ),
    _choice(
        "--exp-avg",
        "--exp-avg-dtype",
        "exp_avg",
        among="fp32 bf16 fp16 fp8",
        default="fp32",
        show_default=True,
        help="Adam's first moment.",
    ),
    _choice(
        "--exp-avg-sq",
        "--exp-avg-sq-dtype",
        "exp_avg_sq",
        among="fp32 bf16 fp16 fp8",
        default="fp32",
        show_default=True,
        help="Adam's second moment.",
    ),
    click.option(
        "--optimizer-offload",
        "--optimizer-offload-fraction",
        "optimizer_offload",
        type=float,
        default=0.0,
        show_default=True,
        help="Share of the optimizer in the host's memory, 0 to 1.",
    ),
    click.option("--fp8-param-gather", "fp8_params", is_flag=True, help="Parameters are held in fp8."),
    click.option(
        "--gradient-accumulation-fusion/--no-gradient-accumulation-fusion",
        default=True,
        show_default=True,
        help="Transformer Engine accumulates into the gradient's buffer.",
    ),
)
_GPU = (
    click.option(
        "--gpu-memory",
        metavar="SIZE",
        help="80GB, 79.1GiB, or a card such as H100: exits 0 if it fits, else 1.",
    ),
    click.option(
        "--fit", is_flag=True, help="Search for layouts that fit, and keep the sizes that are given."
    ),
    _size("--at-most-tp", help="Largest TP that --fit tries (default: the GPUs of a host)."),
    _size("--at-most-pp", help="With --fit."),
    _size("--at-most-ep", help="With --fit."),
    _size("--show", "count", default=10, show_default=True, help="Layouts that --fit shows."),
)
_ENGINE = (
    engine_option(
        "vLLM's sizes: tp=,pp=,dp=, and ep; after sglang: those of SGLang. Adds the phases of an RL step."
    ),
    click.option(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        "utilization",
        type=float,
        default=0.9,
        show_default=True,
        help="The engine's share of a GPU.",
    ),
    click.option(
        "--colocated/--separate", default=None, help="The engine on the trainer's GPUs, or on others."
    ),
    click.option(
        "--trainer-offload",
        default="weights,grads,optimizer",
        show_default=True,
        metavar="WHAT",
        help="The trainer's memory that is on the host while it does not train, or none.",
    ),
    _choice(
        "--delta", among="gpu host", help="Refits send what changed. Where the trainer keeps what it sent."
    ),
    click.option(
        "--changed",
        type=float,
        metavar="SHARE",
        help="Syncs that nobody waits for: of the elements, the share that a step changes, such as 0.01.",
    ),
    click.option(
        "--refit-from-host", "from_host", is_flag=True, help="Refits read offloaded weights from host memory."
    ),
)
_OUTPUT = (
    click.option("--tensors", is_flag=True, help="List the activations of the fullest stage."),
    click.option(
        "--html", type=click.Path(dir_okay=False), help="Write a page with charts; needs reshard[parity]."
    ),
)
_ALL = (*_LAYOUT, *_BATCH, *_ACTIVATIONS, *_OPTIMIZER, *_GPU, *_ENGINE, *_OUTPUT)


def memory_options(command: Callable) -> Callable:
    """Add all of them to a command."""
    for option in reversed(_ALL):
        command = option(command)
    return command


def _names(options: tuple[Callable, ...]) -> tuple[str, ...]:
    """Return the names of the parameters that these options make."""

    def nothing() -> None: ...

    for option in options:
        option(nothing)
    return tuple(parameter.name for parameter in nothing.__click_params__)  # type: ignore[attr-defined]


# Headings of the help, in order; the layout's first options are those of `layout_options`.
GROUPS = {
    "Model and layout": (
        "path", "trainer", "tp", "pp", "vpp", "ep", "etp", "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", *_names(_LAYOUT),
    ),
    "Batch": _names(_BATCH),
    "Activations": _names(_ACTIVATIONS),
    "Gradients and optimizer": _names(_OPTIMIZER),
    "Does it fit": _names(_GPU),
    "An engine, for an RL step": _names(_ENGINE),
}  # fmt: skip
