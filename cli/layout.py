"""Parallel sizes on the command line: each as an option, or all of them as one list, ``--trainer tp=4,pp=2``
and ``--engine tp=8``."""

import re
from collections.abc import Callable, Collection
from typing import Any

import click

from reshard.cli.options import together

LAYOUT_NAMES = (
    "tp",
    "pp",
    "vpp",
    "ep",
    "etp",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "gtp",
    "egtp",
)
REDUNDANT = "redundant_experts"  # of an engine
SWITCHES = {"account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"}

_SIZE = click.IntRange(min=1)


def _size(*names: str, text: str, default: int | None = None) -> Callable:
    return click.option(*names, type=_SIZE, default=default, show_default=default is not None, help=text)


# For each of Megatron's parallel sizes.
layout_options = together(
    _size("--tp", "--tensor-model-parallel-size", "tp", default=1, text="Tensor parallel size."),
    _size("--pp", "--pipeline-model-parallel-size", "pp", default=1, text="Pipeline parallel size."),
    _size(
        "--vpp",
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
        "vpp",
        default=1,
        text="Virtual stages per pipeline rank.",
    ),
    _size("--ep", "--expert-model-parallel-size", "ep", default=1, text="Expert parallel size."),
    _size(
        "--etp",
        "--expert-tensor-parallel-size",
        "etp",
        text="Expert tensor parallel size (default: TP, as in Megatron).",
    ),
    _size(
        "--num-layers-in-first-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        "num_layers_in_first_pipeline_stage",
        text="Layers on the first pipeline rank.",
    ),
    _size(
        "--num-layers-in-last-pipeline-stage",
        "--decoder-last-pipeline-num-layers",
        "num_layers_in_last_pipeline_stage",
        text="Layers on the last pipeline rank.",
    ),
    click.option(
        "--account-for-embedding-in-pipeline-split", is_flag=True, help="The embedding counts as a layer."
    ),
    click.option("--account-for-loss-in-pipeline-split", is_flag=True, help="The loss counts as a layer."),
    click.option(
        "--pipeline-model-parallel-layout", help="Megatron's layout string, such as 'Et*3|t*4|t*3L'."
    ),
    _size("--gtp", default=1, text="Ranks of GTP: --tensor-parallel-num-weight-shards / TP."),
    _size("--egtp", default=1, text="The same of experts: --expert-tensor-parallel-num-weight-shards / ETP."),
)


def trainer_option(required: bool = False, names: str = "tp=,pp=,vpp=,ep=,etp=, ...") -> Callable:
    """Return the option ``--trainer``, which takes Megatron's sizes as one list."""
    return click.option(
        "--trainer", required=required, metavar="SIZES", help=f"Megatron's sizes as one list: {names}"
    )


def engine_option(text: str, required: bool = False) -> Callable:
    """Return the option ``--engine``, which takes an engine's sizes as one list."""
    return click.option("--engine", required=required, metavar="SIZES", help=text)


def given_options() -> dict[str, click.Parameter]:
    """Return the options that stand on the command line, by name, in the command's order."""
    context = click.get_current_context()
    return {
        option.name: option
        for option in context.command.params
        if option.name is not None
        and context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
    }


def pop_layout(options: dict[str, Any], extra: Collection[str] = ()) -> dict[str, Any]:
    """Take a command's parallel sizes out of its options: those of `layout_options`, or the list of
    ``--trainer``.

    Return the arguments of `reshard.MegatronLayout`. Sizes of the list that are named in `extra`, such as
    ``dp``, go to the options. Raises UsageError if a size is given in both ways.
    """
    layout = {name: options.pop(name) for name in LAYOUT_NAMES}
    text = options.pop("trainer", None)
    if text is None:
        return layout
    given = given_options()
    for name in (*LAYOUT_NAMES, *extra):
        if name in given:
            raise click.UsageError(
                f"--trainer and --{name.replace('_', '-')} both give sizes: use one of the two"
            )
    sizes = megatron_sizes(text, extra)
    options |= {name: sizes.pop(name) for name in extra if name in sizes}
    return sizes


def megatron_sizes(text: str, extra: Collection[str] = ()) -> dict[str, Any]:
    """Read ``tp=4,pp=2``, the value of ``--trainer``; sizes may have Megatron's long names. A pipeline layout
    string comes last, as it may have commas. `extra` are names besides those of a layout."""
    from reshard.megatron.layout import LONG_NAMES

    head, has_string, string = text.partition("pipeline_model_parallel_layout=")
    if has_string and not head.strip():
        head = "pp=1"  # only the string is given
    numbers = ({*LAYOUT_NAMES} - SWITCHES - {"pipeline_model_parallel_layout"}) | {*extra}
    sizes = parse_sizes(head, "--trainer", numbers, SWITCHES, LONG_NAMES)
    sizes |= dict.fromkeys(SWITCHES & sizes.keys(), True)
    return sizes | ({"pipeline_model_parallel_layout": string} if has_string else {})


def engine_layout(text: str, option: str, names: Collection[str] = ("tp", "pp", "dp", REDUNDANT)) -> Any:
    """Read ``tp=4,ep``, the value of ``--engine``, as a `reshard.VllmLayout`; after ``sglang:`` as a
    `reshard.SglangLayout`. `names` are the sizes that may be given, besides ``ep``."""
    engine, colon, sizes = text.partition(":")
    if not colon:
        engine, sizes = "vllm", text
    if engine not in _ENGINES:
        raise click.UsageError(f"{option} {text}: {engine!r} is not one of {', '.join(_ENGINES)}")
    return _ENGINES[engine](sizes, option, {*names})


def _vllm_layout(text: str, option: str, names: set[str]) -> Any:
    from reshard.engines.vllm.layout import VllmLayout

    aliases = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}
    aliases[f"num_{REDUNDANT}"] = REDUNDANT
    aliases = {name: short for name, short in aliases.items() if short in names}
    sizes = parse_sizes(text, option, names, {"ep"}, aliases)
    experts = sizes.pop("ep", None)
    if experts not in (None, "", "linear", "round_robin"):
        raise click.UsageError(
            f"{option} ep={experts}: vLLM spreads experts over TP times DP; say ep, or ep=round_robin"
        )
    return VllmLayout(**sizes, expert_parallel=experts is not None, round_robin=experts == "round_robin")


def _sglang_layout(text: str, option: str, names: set[str]) -> Any:
    from reshard.engines.sglang.weights.layout import SglangLayout

    names = {*names, "ep"}
    aliases = {f"{name}_size": name for name in names} | {f"ep_num_{REDUNDANT}": REDUNDANT}
    values = parse_sizes(text, option, names, {"ep"}, aliases)
    if values.get("ep") == "":  # over all of TP
        values["ep"] = values.get("tp", 1)
    return SglangLayout(**values)


_ENGINES = {"vllm": _vllm_layout, "sglang": _sglang_layout}


def parse_sizes(
    text: str, option: str, numbers: set[str], words: set[str], aliases: dict[str, str]
) -> dict[str, Any]:
    """Read ``tp=4,ep`` as ``{"tp": 4, "ep": ""}``, and ``tp4`` or ``TP4``, as layouts are printed,
    as ``tp=4``.

    `numbers` are names with a positive number, `words` those with a text or nothing, `aliases` other names of
    these. Raises UsageError, naming the entry.
    """
    if not text.strip():
        raise click.UsageError(f"{option} is empty: give sizes such as tp=1")
    values: dict[str, Any] = {}
    for entry in filter(None, text.split(",")):
        printed = re.fullmatch(r"([A-Za-z]+)(\d+)", entry)
        name, value = (printed[1].lower(), printed[2]) if printed else entry.partition("=")[::2]
        name = aliases.get(name, name)
        if name in values:
            raise click.UsageError(f"{option} {text}: {name} is given twice")
        if name in numbers and value.isdecimal() and int(value):
            values[name] = int(value)
        elif name in words:
            values[name] = value
        else:
            known = ", ".join(f"{n}=N" for n in sorted(numbers)) + "".join(f", {n}" for n in sorted(words))
            raise click.UsageError(f"{option} {text}: {entry!r} is not one of {known}")
    return values
