"""Layouts on the command line: Megatron's as options, under its short names and its own; either engine's as
one list of sizes."""

from collections.abc import Callable
from typing import Any

import click

LAYOUT_NAMES = (
    "tp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "first_stage_layers",
    "last_stage_layers",
    "embedding_in_split",
    "loss_in_split",
    "pipeline",
)
_SIZE = click.IntRange(min=1)
_OPTIONS = (
    click.option(
        "--tp",
        "--tensor-model-parallel-size",
        "tp",
        type=_SIZE,
        default=1,
        show_default=True,
        help="Tensor parallel size.",
    ),
    click.option(
        "--pp",
        "--pipeline-model-parallel-size",
        "pp",
        type=_SIZE,
        default=1,
        show_default=True,
        help="Pipeline parallel size.",
    ),
    click.option(
        "--vpp",
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
        "vpp",
        type=_SIZE,
        default=1,
        show_default=True,
        help="Virtual stages per pipeline rank.",
    ),
    click.option(
        "--ep",
        "--expert-model-parallel-size",
        "ep",
        type=_SIZE,
        default=1,
        show_default=True,
        help="Expert parallel size.",
    ),
    click.option(
        "--etp",
        "--expert-tensor-parallel-size",
        "etp",
        type=_SIZE,
        help="Expert tensor parallel size (default: TP, as in Megatron).",
    ),
    click.option(
        "--first-stage-layers",
        "--decoder-first-pipeline-num-layers",
        "--num-layers-in-first-pipeline-stage",
        "first_stage_layers",
        type=_SIZE,
        help="Layers on the first pipeline rank.",
    ),
    click.option(
        "--last-stage-layers",
        "--decoder-last-pipeline-num-layers",
        "--num-layers-in-last-pipeline-stage",
        "last_stage_layers",
        type=_SIZE,
        help="Layers on the last pipeline rank.",
    ),
    click.option(
        "--account-for-embedding-in-pipeline-split",
        "embedding_in_split",
        is_flag=True,
        help="The embedding counts as a layer.",
    ),
    click.option(
        "--account-for-loss-in-pipeline-split",
        "loss_in_split",
        is_flag=True,
        help="The loss counts as a layer.",
    ),
    click.option(
        "--pipeline-model-parallel-layout",
        "--pipeline-layout",
        "pipeline",
        help="Megatron's layout string, such as 'Et*3|t*4|t*3L'.",
    ),
)


def layout_options(command: Callable) -> Callable:
    """Adds the options of a layout to a command, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sizes_of(text: str, option: str, numbers: set[str], words: set[str]) -> dict[str, Any]:
    """``tp=4,pp=2`` as a dict; a pipeline layout, which may have commas, comes last."""
    if not text.strip():
        raise click.UsageError(f"{option} is empty: give sizes such as tp=1")
    head, found, layout = text.partition("pipeline=") if "pipeline" in words else (text, "", "")
    values: dict[str, Any] = {"pipeline": layout} if found else {}
    for entry in filter(None, head.split(",")):
        name, _, value = entry.partition("=")
        if name in values:
            raise click.UsageError(f"{option} {text}: {name} is given twice")
        if name in numbers and value.isdecimal() and int(value):
            values[name] = int(value)
        elif name in words:
            values[name] = value
        else:
            names = ", ".join(f"{n}=N" for n in sorted(numbers)) + "".join(f", {n}" for n in sorted(words))
            raise click.UsageError(f"{option} {text}: {entry!r} is none of {names}")
    return values


def vllm_layout(text: str, option: str, numbers: set[str]) -> Any:
    """``tp=4,ep`` as a `reshard.VllmLayout`."""
    from reshard.engines.vllm.layout import VllmLayout

    sizes = sizes_of(text, option, numbers, {"ep"})
    experts = sizes.pop("ep", None)
    if experts not in (None, "", "linear", "round_robin"):
        raise click.UsageError(
            f"{option} ep={experts}: vLLM spreads experts over TP times DP; say ep, or ep=round_robin"
        )
    return VllmLayout(**sizes, expert_parallel=experts is not None, round_robin=experts == "round_robin")
