"""``reshard parity``."""

import os
from pathlib import Path
from typing import Any

import click

from reshard.cli.layout import engine_option, layout_options, pop_layout, trainer_option, vllm_layout
from reshard.cli.output import ignore_option, json_option, print_json, quiet
from reshard.cli.places import Place
from reshard.core.errors import ReshardError


@click.command("parity")
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.option("--prompts", type=Place(), help="A line each: text, or JSON with text or tokens.")
@click.option(
    "--random", "count", type=click.IntRange(min=1), help="So many prompts of random tokens (default: 8)."
)
@click.option("--lengths", default="16,64,128", show_default=True, help="Lengths of random prompts, in turn.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Prompts at a time, padded to the longest.",
)
@click.option("--packed", is_flag=True, help="Pack the prompts of a batch into one sequence instead.")
@click.option(
    "--routing/--no-routing", default=True, show_default=True, help="Compare the experts that tokens go to."
)
@engine_option("vLLM's tp= and ep (default: TP over all processes).")
@click.option(
    "--quantization", metavar="WAY", help="vLLM's own, such as fp8_per_block; it is for vllm: systems."
)
@click.option(
    "--exact",
    is_flag=True,
    help="A refitted vLLM in fp8 blocks gets the bits of vLLM's own loading, which may round twice.",
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: bf16 with a GPU, fp32 without.")
@click.option("--hf-config", type=Place(), help="config.json to read a Megatron checkpoint with.")
@click.option(
    "--noise/--no-noise",
    default=None,
    help="Measure what either system rounds, and score A again (default: measure it, where the dtype is not fp32).",
)
@click.option(
    "--reach/--no-reach",
    default=True,
    show_default=True,
    help="Also score a prompt of few tokens at positions as far as the context goes.",
)
@click.option(
    "--max-noise-ratio", "noise_ratio", type=float, help="Largest difference in units of measured rounding."
)
@click.option("--max-abs", type=float, help="Largest |difference| of two logprobs that passes.")
@click.option("--max-mean-abs", "mean_abs", type=float, help="Largest mean |difference|.")
@click.option(
    "--max-token-mult-prob-error",
    "token_mult_prob_error",
    type=float,
    help="Largest mean of exp |difference|.",
)
@click.option("--max-kl", "kl", type=float, help="Largest KL over the vocabulary, in nats.")
@click.option(
    "--min-argmax-agreement",
    "argmax_agreement",
    type=float,
    help="Smallest share of positions with the same best token.",
)
@click.option(
    "--max-routing-margin",
    "routing_margin",
    type=float,
    help="How far from a tie a token may be that goes elsewhere.",
)
@click.option(
    "--html",
    type=Place(dir_okay=False, writable=True),
    help="Also write a report with drawings to this file.",
)
@click.option(
    "--locate", "locating", is_flag=True, help="Where parity fails, name the first module that departs."
)
@trainer_option()
@layout_options
@ignore_option
@json_option
def command(
    a: str,
    b: str,
    prompts: str | None,
    count: int | None,
    lengths: str,
    locating: bool,
    html: str | None,
    engine: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Score the same prompts in A and in B, and exit 1 where their logprobs are further apart than the
    limits.

    Each is a Hugging Face directory or hub id, which transformers runs, or a Megatron checkpoint, which
    Megatron-Core runs; at a layout of several ranks start this under torchrun: torchrun --nproc-per-node 4
    --no-python reshard parity A B --tp 2 --pp 2

    With vllm: before it, vLLM serves it: vllm:HF as vLLM loads it, vllm:MEGATRON refitted from Megatron-Core
    at the layout.
    """
    if prompts is not None and count is not None:
        raise click.UsageError("--prompts and --random exclude each other")
    numbers = _lengths(lengths)
    from reshard.core.extras import require
    from reshard.megatron.layout import MegatronLayout
    from reshard.parity.gate import LIMITED, Limits, parity
    from reshard.parity.prompts import SERVED, read_prompts, tokenizer_of

    if locating and (a.startswith(SERVED) or b.startswith(SERVED)):
        raise click.UsageError(
            "--locate looks inside transformers and Megatron-Core, not inside vLLM: compare those two"
        )
    if html is not None:
        _check_page(Path(html))
    require("parity", "torch", "transformers", *(["bokeh", "jinja2"] if html is not None else []))
    quiet()
    given = {name: value for name in LIMITED if (value := options.pop(name, None)) is not None}
    if "routing_margin" in given and not options["routing"]:
        raise click.UsageError("--no-routing leaves nothing for --max-routing-margin to limit")
    layout = MegatronLayout(**pop_layout(options))
    wanted = read_prompts(Path(prompts), lambda: tokenizer_of([a, b])) if prompts is not None else count or 8
    served = vllm_layout(engine, "--engine", {"tp"}) if engine is not None else None
    found = parity(a, b, wanted, layout=layout, engine=served, lengths=numbers,
                   limits=lambda dtype: Limits.of_dtype(dtype, **given), **options)  # fmt: skip
    located = None
    if locating and not found.ok:
        from reshard.parity.locate import locate

        prompt, positions = found.prompt_to_locate
        located = locate(
            a,
            b,
            prompt,
            dtype=found.dtype,
            layout=layout,
            hf_config=options["hf_config"],
            positions=positions,
        )
    if not found.first_process:
        raise click.exceptions.Exit(0 if found.ok else 1)
    page = Path(html) if html is not None else None
    _conclude(found, {"located": located} if locating else {}, [a, b], page, as_json)


def _conclude(
    found: Any, looked: dict[str, Any], compared: list[str], page: Path | None, as_json: bool
) -> None:
    """Say what was found, and where the two depart if that was looked for; exit 1 where they are apart, or the
    page could not be written."""
    located = looked.get("located")
    if as_json:
        more = {"located": located.to_dict() if located is not None else None} if looked else {}
        print_json(found.to_dict() | more)
    else:
        _show(found)
    sentence = None
    if looked and not found.ok:
        from reshard.parity.locate import sentence_of

        sentence = sentence_of(located)
        if not as_json:
            click.echo(sentence)
    unwritten = _written(found, compared, page, sentence) if page is not None else None
    if unwritten is not None:
        click.echo(f"Error: --html: cannot write {page}: {unwritten.strerror}", err=True)
    if not found.ok:
        click.echo(f"Error: {_verdict(found.exceeded)}: {'; '.join(found.exceeded)}", err=True)
    if not found.ok or unwritten is not None:
        raise click.exceptions.Exit(1)


def _lengths(text: str) -> list[int]:
    """Raises UsageError for anything but numbers above 1."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 1 for part in parts):
        raise click.UsageError(f"--lengths {text} is not a list of numbers above 1, such as 16,64")
    return [int(part) for part in parts]


def _verdict(exceeded: list[str]) -> str:
    """What it means that these limits are exceeded."""
    unknown = all("was not measured" in sentence or "too few" in sentence for sentence in exceeded)
    return "A and B cannot be held against the limits" if unknown else "A and B do not hold the same model"


def _check_page(page: Path) -> None:
    """Raise ReshardError where the report could not be written."""
    folder = page.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "not writable" if folder.is_dir() else "not a directory; create it first"
        raise ReshardError(f"--html: {folder} is {problem}")
    if os.environ.get("RANK", "0") == "0":
        _try_to_write(page)


def _try_to_write(path: Path) -> None:
    """Raise ReshardError where a file cannot be written, which is better known before an hour of scoring than
    after it."""
    there = path.exists()
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ReshardError(f"--html: cannot write {path}: {error.strerror}") from error
    finally:
        if not there:
            path.unlink(missing_ok=True)


def _written(found: Any, systems: list[str], path: Path, located: str | None) -> OSError | None:
    """Write the report; the error where that fails, after the result has been printed."""
    from reshard.parity.html import UNENCODABLE, html_report

    try:
        path.write_text(html_report(found, systems, located), encoding="utf-8", errors=UNENCODABLE)
    except OSError as error:
        return error
    return None


def _show(found: Any) -> None:
    click.echo(f"A: {found.a}\nB: {found.b}")
    columns = found.columns
    width = max(20, *(len(name) + 2 for name in columns))
    click.echo(
        f"{found.overall.tokens} tokens of {len(found.prompts)} prompts".ljust(36)
        + "".join(f"{name:>{width}}" for name in columns)
    )
    for name, value in found.overall.to_dict().items():
        if name == "tokens" or value is None:
            continue
        shown = (getattr(metrics, name) for metrics in columns.values())
        click.echo(
            f"  {name:<34}" + "".join(f"{'-' if v is None else format(v, '.6g'):>{width}}" for v in shown)
        )
    for sentence in found.sentences:
        click.echo(sentence)
    for sentence in found.unmeasured:
        click.echo(f"note: {sentence}")
    worst = found.worst
    click.echo(
        f"worst prompt: {worst} ({found.prompts[worst].tokens} tokens), mean_abs "
        f"{found.prompts[worst].mean_abs:.6g}"
    )
    click.echo(f"limits: {', '.join(_limits(found))}")
    if found.ok:
        click.echo("A and B hold the same model: every figure is within its limit")


def _limits(found: Any) -> list[str]:
    """The limits on figures that were measured; the notes and the verdict have the others."""
    figures = found.overall.to_dict()
    figures["routing_margin"] = found.routing.margin if found.routing is not None else None
    figures["noise_ratio"] = found.rounding.ratio if found.rounding is not None else None
    return [
        f"{name} {'>=' if name == 'argmax_agreement' else '<='} {limit:.6g}"
        for name, limit in found.limits.to_dict().items()
        if limit is not None and figures[name] is not None
    ]
