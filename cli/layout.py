"""Megatron's layout as options of a command, under its short names and Megatron's own."""

from collections.abc import Callable

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
    click.option("--tp", "--tensor-model-parallel-size", "tp", type=_SIZE, default=1, show_default=True, help="Tensor parallel size."),
    click.option("--pp", "--pipeline-model-parallel-size", "pp", type=_SIZE, default=1, show_default=True, help="Pipeline parallel size."),
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
    click.option("--ep", "--expert-model-parallel-size", "ep", type=_SIZE, default=1, show_default=True, help="Expert parallel size."),
    click.option(
        "--etp", "--expert-tensor-parallel-size", "etp", type=_SIZE, help="Expert tensor parallel size (default: TP, as in Megatron)."
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
    click.option("--account-for-embedding-in-pipeline-split", "embedding_in_split", is_flag=True, help="The embedding counts as a layer."),
    click.option("--account-for-loss-in-pipeline-split", "loss_in_split", is_flag=True, help="The loss counts as a layer."),
    click.option(
        "--pipeline-model-parallel-layout", "--pipeline-layout", "pipeline", help="Megatron's layout string, such as 'Et*3|t*4|t*3L'."
    ),
)


def layout_options(command: Callable) -> Callable:
    """Adds the options of a layout to a command, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
