"""``reshard plan``."""

import contextlib
import math
from typing import Any

import click

from reshard.cli.layout import engine_layout, engine_option, megatron_sizes, trainer_option
from reshard.cli.options import DtypeChoice
from reshard.cli.output import ignore_option, json_option, print_json, print_note, progress_bar
from reshard.cli.places import model_argument
from reshard.core.limits import MAX_VOCAB_MULTIPLE


class _Rate(click.FloatRange):
    """Positive and finite: NaN is in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        rate = super().convert(value, param, ctx)
        if not math.isfinite(rate):
            self.fail(f"{value} is not a rate", param, ctx)
        return rate


_RATE = _Rate(min=0, min_open=True)


class _Percent(click.ParamType):
    """A percentage, with or without its sign, as a share of 1."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        with contextlib.suppress(ValueError):
            percent = float(str(value).removesuffix("%"))
            if 0 <= percent <= 100:
                return percent / 100
        self.fail(f"{value!r:.40} is not a percentage from 0 to 100, such as 1 or 0.3%", param, ctx)


@click.command("plan")
@model_argument
@trainer_option(True, "tp=,pp=,vpp=,ep=,etp=,dp=,cp=, ...")
@engine_option(
    "vLLM's sizes: tp=,pp=,dp=, and ep or ep=round_robin for expert parallelism. After sglang:, SGLang's: "
    "tp=,pp=,ep=, and dp= of attention. redundant_experts= of both.",
    required=True,
)
@click.option(
    "--colocated/--separate",
    default=None,
    help="On the same GPUs (default if both sides have as many ranks), or the engine's GPUs after the trainer's.",
)
@click.option(
    "--engines", type=click.IntRange(min=1), default=1, show_default=True, help="Engines of this layout."
)
@click.option("--gpus-per-host", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--link-rate",
    type=_RATE,
    default=370,
    show_default=True,
    help="GB/s of a GPU's links within a host, each direction.",
)
@click.option(
    "--network-rate",
    type=_RATE,
    default=50,
    show_default=True,
    help="GB/s of a GPU's network, each direction.",
)
@click.option(
    "--memory-rate",
    type=_RATE,
    default=4200,
    show_default=True,
    help="GB/s of a GPU's memory, reads and writes together.",
)
@click.option("--dtype", type=DtypeChoice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--make-vocab-size-divisible-by",
    type=click.IntRange(1, MAX_VOCAB_MULTIPLE),
    default=128,
    show_default=True,
)
@click.option(
    "--transformer-impl",
    type=click.Choice(["transformer_engine", "local"]),
    default="transformer_engine",
    show_default=True,
)
@click.option(
    "--changed",
    type=_Percent(),
    help="Percent of the elements that a step changes, for refits with deltas.",
)
@click.option("--ranks", help="Plan only these inference ranks, such as 0,1,17.")
@ignore_option
@json_option
def command(
    path: str,
    trainer: str,
    engine: str,
    dtype: str,
    ranks: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a refit of vLLM or SGLang from a Megatron trainer: bytes in, out and local per GPU, least times,
    memory, planning time.

    Examples: reshard plan Qwen/Qwen3-32B --trainer tp=4,pp=2 --engine tp=8

    reshard plan Qwen/Qwen3-30B-A3B --trainer tp=2,ep=4 --engine sglang:tp=8,ep
    """
    from reshard.megatron.layout import MegatronLayout
    from reshard.models.config_fields import check_ignored
    from reshard.plan import plan_refit
    from reshard.storage.sources.opening import read_model

    source = megatron_sizes(trainer, ("dp", "cp"))
    extra = {name: source.pop(name) for name in ("dp", "cp") if name in source}
    for name in ("link_rate", "network_rate", "memory_rate"):
        options[name] *= 1e9
    layouts = MegatronLayout(**source), engine_layout(engine, "--engine")
    options |= {
        "ranks": _numbers(ranks, "--ranks"),
        "itemsize": 4 if dtype == "fp32" else 2,
    }
    model = read_model(path)
    check_ignored(model)
    with progress_bar("plan", "{} ranks".format) as progress:
        forecast = plan_refit(model, layouts[0], layouts[1], progress=progress, **extra, **options)
    notices = model.notices
    if as_json:
        print_json(forecast.to_dict() | {"notices": notices})
        return
    for line in forecast.lines():
        click.echo(line)
    for notice in notices:
        print_note(notice)


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise click.UsageError(f"{option} {text} is not a list of numbers such as 0,2,1,3")
    return [int(part) for part in text.split(",")]
