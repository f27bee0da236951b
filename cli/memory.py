"""``reshard memory``."""

from pathlib import Path
from typing import Any

import click

from reshard.cli.layout import (
    LAYOUT_NAMES,
    engine_layout,
    given_options,
    layout_options,
    pop_layout,
    trainer_option,
)
from reshard.cli.memory_options import GROUPS, memory_options
from reshard.cli.options import grouped
from reshard.cli.output import ignore_option, json_option, print_json, print_note, write_page
from reshard.cli.places import model_argument
from reshard.core.errors import ReshardError

RANKING = (
    "memory is predicted, time is not: first those that surely fit, then less recomputed, less offloaded, a smaller "
    "bubble, less TP, EP within a host"
)
# Options that say something about what another one asks for, and nothing without it.
NEEDING = {
    "engine": ("utilization", "colocated", "trainer_offload", "delta", "changed", "from_host"),
    "fit": ("at_most_tp", "at_most_pp", "at_most_ep", "count"),
}


@click.command("memory", cls=grouped(GROUPS))
@model_argument
@trainer_option(names="tp=,pp=,vpp=,ep=,etp=,dp=,cp=, ...")
@layout_options
@memory_options
@ignore_option
@json_option
@click.pass_context
def command(
    context: click.Context, path: str, as_json: bool, tensors: bool, html: str | None, **options: Any
) -> None:
    """Estimate the memory that training a model at a layout needs on each GPU, before there is a GPU.

    Example: reshard memory Qwen/Qwen3-30B-A3B --tp 2 --ep 8 --etp 1 --gpus 16 --gpu-memory H100
    """
    from reshard.megatron.layout import MegatronLayout
    from reshard.memory.activations import uncounted
    from reshard.memory.estimate import estimate_memory
    from reshard.memory.options import Training
    from reshard.memory.outside import bytes_of_gpu
    from reshard.models.config_fields import check_ignored
    from reshard.storage.sources.opening import read_model

    _check_needed()
    options["recompute"] = _recompute(options)
    sizes = pop_layout(options, ("dp", "cp"))
    fitting = {name: options.pop(name) for name in ("fit", "at_most_tp", "at_most_pp", "at_most_ep", "count")}
    engine = {name: options.pop(name) for name in (*NEEDING["engine"], "engine")}
    text = options.pop("gpu_memory")
    gpu_bytes = None if text is None else bytes_of_gpu(text)
    training, engine_setup = Training(**options), _engine(engine)
    layout = None if fitting["fit"] else MegatronLayout(**sizes)
    if fitting["fit"] and (tensors or html is not None):
        raise click.UsageError(f"{'--tensors' if tensors else '--html'} shows one layout, not those of --fit")
    if html is not None:
        _check_html(html)
    model = read_model(path)
    check_ignored(model)
    if fitting["fit"]:
        _fit(context, model, training, gpu_bytes, sizes, fitting, model.notices + uncounted(model), as_json)
        return
    report = estimate_memory(model, layout, gpu_memory=gpu_bytes, engine=engine_setup, **options)
    if html is not None:
        from reshard.memory.html import html_report

        try:
            write_page(Path(html), html_report(report, str(path)))
        except OSError as error:
            raise ReshardError(f"--html: cannot write {html}: {error.strerror}") from error
    if as_json:
        print_json(report.to_dict())
    else:
        for line in report.lines(tensors):
            click.echo(line)
        for notice in report.notices:
            print_note(notice)
    if report.gpu_bytes is not None and not report.fits:
        context.exit(1)


def _check_needed() -> None:
    """Raise UsageError for an option that would have no effect, since the one that it belongs to was not given."""
    given = given_options()
    for needed, needing in NEEDING.items():
        for name, option in given.items():
            if name in needing and needed not in given:
                raise click.UsageError(f"{'/'.join(option.opts + option.secondary_opts)} needs --{needed}")


def _recompute(options: dict[str, Any]) -> str:
    """Return the recomputation as one text, from ``--recompute`` or Megatron's four options."""
    text, granularity, method, layers, modules = (
        options.pop(name)
        for name in (
            "recompute",
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
        )
    )
    if granularity is None:
        if method or layers or modules:
            raise click.UsageError(
                "--recompute-method, -num-layers and -modules need --recompute-granularity"
            )
        return "none" if text is None else text
    if text is not None:
        raise click.UsageError("--recompute and --recompute-granularity say the same: give one of the two")
    if granularity == "selective":
        if method or layers:
            raise click.UsageError(
                "--recompute-method and --recompute-num-layers are for --recompute-granularity full"
            )
        return ",".join((modules or "core_attn").replace(",", " ").split())
    if modules:
        raise click.UsageError("--recompute-modules is for --recompute-granularity selective")
    return f"{method or 'uniform'}:{layers or 1}"


def _engine(options: dict[str, Any]) -> Any:
    from reshard.memory.phases import EngineSetup

    if options["engine"] is None:
        return None
    names = [name.strip() for name in options["trainer_offload"].split(",")]
    return EngineSetup(
        engine_layout(options["engine"], "--engine"), options["utilization"], options["colocated"],
        () if names == ["none"] else tuple(names), delta=options["delta"],
        from_host=options["from_host"], changed=options["changed"],
    )  # fmt: skip


def _check_html(path: str) -> None:
    from reshard.core.extras import require

    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ReshardError(f"--html: {folder} is not a directory")
    require("parity", "bokeh", "jinja2")


def _fit(
    context: click.Context,
    model: Any,
    training: Any,
    gpu_bytes: int | None,
    sizes: dict[str, Any],
    limits: dict[str, Any],
    notices: list[str],
    as_json: bool,
) -> None:
    from click.core import ParameterSource

    from reshard.memory.fit import SearchSpace, fit, fit_lines

    def was_given(name: str) -> bool:
        return context.get_parameter_source(name) is not ParameterSource.DEFAULT

    if gpu_bytes is None:
        raise click.UsageError("--fit needs --gpu-memory")
    if training.gpus is None:
        raise click.UsageError("--fit needs --gpus")
    if was_given("engine"):
        raise click.UsageError("--fit searches layouts for training alone: give --engine with one layout")
    fixed_names = set(sizes) if was_given("trainer") else {name for name in LAYOUT_NAMES if was_given(name)}
    others = sorted(fixed_names - {"tp", "pp", "vpp", "ep"})
    others += [name for name in ("recompute", "recompute_granularity", "dp") if was_given(name)]
    if others:
        raise click.UsageError(f"--fit chooses --{others[0].replace('_', '-')} itself")
    fixed = {name: (sizes[name],) for name in fixed_names}
    space = SearchSpace(
        **fixed, cp=(training.cp,), at_most_tp=limits["at_most_tp"], at_most_pp=limits["at_most_pp"],
        at_most_ep=limits["at_most_ep"], offload=not was_given("optimizer_offload"),
    )  # fmt: skip
    layouts, tried = fit(model, training, gpu_bytes, space, limits["count"])
    if as_json:
        print_json(
            {
                "looked_at": tried,
                "gpu_bytes": gpu_bytes,
                "layouts": [layout.to_dict() for layout in layouts],
                "notices": notices,
            }
        )
    else:
        for line in fit_lines(layouts, tried, training.gpus, gpu_bytes):
            click.echo(line)
        for notice in [RANKING, *notices] if layouts else []:
            print_note(notice)
    if not any(layout.surely for layout in layouts):
        context.exit(1)
