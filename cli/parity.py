"""``reshard parity``."""

import os
from pathlib import Path
from typing import Any

import click

from reshard.cli.layout import (
    engine_layout,
    engine_option,
    given_options,
    layout_options,
    pop_layout,
    trainer_option,
)
from reshard.cli.options import DtypeChoice
from reshard.cli.output import ignore_option, json_option, print_json, quiet, write_page
from reshard.cli.places import PathOrHubId
from reshard.core.errors import ReshardError


@click.command("parity")
@click.argument("a", type=PathOrHubId())
@click.argument("b", type=PathOrHubId())
@click.option(
    "--prompts", type=PathOrHubId(), help="File with a prompt per line: text, or JSON with text or tokens."
)
@click.option(
    "--random",
    "count",
    type=click.IntRange(min=1),
    help="Make this many prompts of random tokens (default: 8).",
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
@engine_option("vLLM's tp= and ep (default: TP over all processes), or after sglang: SGLang's.")
@click.option(
    "--quantization", metavar="METHOD", help="vLLM's quantization of a vllm: system, such as fp8_per_block."
)
@click.option(
    "--match-vllm-rounding",
    "match_vllm_rounding",
    is_flag=True,
    help="Give a refitted vLLM in fp8 blocks the bits of vLLM's own loading, which may round twice.",
)
@click.option("--dtype", type=DtypeChoice(["fp32", "bf16"]), help="Default: bf16 with a GPU, fp32 without.")
@click.option("--hf-config", type=PathOrHubId(), help="config.json to read a Megatron checkpoint with.")
@click.option(
    "--noise/--no-noise",
    default=None,
    help="Measure the rounding of both systems, and score A again (default: measure it unless the dtype is fp32).",
)
@click.option(
    "--reach/--no-reach",
    default=True,
    show_default=True,
    help="Also score a prompt of a few tokens at positions up to the end of the context.",
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
    help="For tokens that go to other experts: how far the scores may be from a tie.",
)
@click.option(
    "--html",
    type=PathOrHubId(dir_okay=False, writable=True),
    help="Also write a report with charts to this file.",
)
@click.option(
    "--locate", "locating", is_flag=True, help="If parity fails, name the first module that diverges."
)
@click.option("--why", is_flag=True, help="Say how much of the difference each cause makes; takes more runs.")
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
    """Score the same prompts in A and in B, and exit 1 if their logprobs differ by more than the
    limits.

    Each is a Hugging Face directory or hub id, which transformers runs, or a Megatron checkpoint,
    which Megatron-Core runs; at a layout of several ranks start this under torchrun: torchrun
    --nproc-per-node 4 --no-python reshard parity A B --tp 2 --pp 2

    With vllm: before it, vLLM serves it: vllm:HF as vLLM loads it, vllm:MEGATRON refitted from
    Megatron-Core at the layout. With sglang: SGLang does: sglang:DIRECTORY as it loads either format, or
    sglang:http://HOST:PORT for what a running server serves.
    """
    _check_usage(prompts, count, options)
    numbers = _lengths(lengths)
    from reshard.core.extras import require
    from reshard.megatron.layout import MegatronLayout
    from reshard.parity.gate import parity
    from reshard.parity.limits import LIMITED, Limits
    from reshard.parity.prompts import read_prompts, tokenizer_of
    from reshard.parity.served import engine_of

    if locating and (engine_of(a) or engine_of(b)):
        raise click.UsageError(
            "--locate looks inside transformers and Megatron-Core, not inside an engine: compare those two"
        )
    require("parity", "torch", "transformers", *(["bokeh", "jinja2"] if html is not None else []))
    if locating:
        from reshard.parity.systems.opening import check_one_of_each

        check_one_of_each(a, b)
    if html is not None:
        _check_page(Path(html))
    quiet()
    given = {name: value for name in LIMITED if (value := options.pop(name, None)) is not None}
    layout = MegatronLayout(**pop_layout(options))
    wanted = read_prompts(Path(prompts), lambda: tokenizer_of([a, b])) if prompts is not None else count or 8
    served = engine_layout(engine, "--engine", ["tp"]) if engine is not None else None
    report = parity(a, b, wanted, layout=layout, engine=served, lengths=numbers,
                    limits=lambda dtype: Limits.of_dtype(dtype, **given), **options)  # fmt: skip
    divergence = None
    if locating and not report.ok:
        divergence = _find_divergence(report, a, b, layout, options["hf_config"])
    if not report.first_process:
        raise click.exceptions.Exit(0 if report.ok else 1)
    _conclude(report, divergence, locating, [a, b], html, as_json)


def _check_usage(prompts: str | None, count: int | None, options: dict[str, Any]) -> None:
    """Raise UsageError for options that exclude each other."""
    if prompts is not None and count is not None:
        raise click.UsageError("--prompts and --random exclude each other")
    if prompts is not None and "lengths" in given_options():
        raise click.UsageError("--lengths is for random prompts: leave it out, or --prompts")
    if options["routing_margin"] is not None and not options["routing"]:
        raise click.UsageError("--no-routing leaves nothing for --max-routing-margin to limit")
    if options["noise_ratio"] is not None and options["noise"] is False:
        raise click.UsageError("--no-noise leaves nothing for --max-noise-ratio to limit")


def _conclude(
    report: Any, divergence: Any, located: bool, systems: list[str], html: str | None, as_json: bool
) -> None:
    """Print the result and write the page; exit 1 where a limit is exceeded or the page cannot be
    written."""
    if as_json:
        added = {"located": divergence and divergence.to_dict()} if located else {}
        print_json(report.to_dict() | added)
    else:
        for line in report.lines(verdict=report.ok):  # another one is an error, below
            click.echo(line)
    sentence = None
    if located and not report.ok:
        from reshard.parity.divergence import describe_divergence

        sentence = describe_divergence(divergence)
        if not as_json:
            click.echo(sentence)
    written = html is None or _write_page(Path(html), report, systems, sentence)
    if not report.ok:
        click.echo(f"Error: {report.verdict}", err=True)
    if not report.ok or not written:
        raise click.exceptions.Exit(1)


def _find_divergence(report: Any, a: str, b: str, layout: Any, hf_config: str | None) -> Any:
    """Return the first module that diverges for the prompt that shows the difference best; None
    without one."""
    from reshard.parity.divergence import find_divergence

    prompt, positions = report.diverging_prompt
    return find_divergence(
        a, b, prompt, dtype=report.dtype, layout=layout, hf_config=hf_config, positions=positions
    )


def _lengths(text: str) -> list[int]:
    """Read ``16,64``. Raises UsageError for anything but numbers above 1."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 1 for part in parts):
        raise click.UsageError(f"--lengths {text} is not a list of numbers above 1, such as 16,64")
    return [int(part) for part in parts]


def _check_page(page: Path) -> None:
    """Raise ReshardError if the report cannot be written: before scoring, not an hour after."""
    folder = page.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "not writable" if folder.is_dir() else "not a directory; create it first"
        raise ReshardError(f"--html: {folder} is {problem}")
    if os.environ.get("RANK", "0") == "0":
        _try_to_write(page)


def _try_to_write(path: Path) -> None:
    """Raise ReshardError if a file cannot be opened for writing. No new file is left behind."""
    existed = path.exists()
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ReshardError(f"--html: cannot write {path}: {error.strerror}") from error
    finally:
        if not existed:
            path.unlink(missing_ok=True)


def _write_page(page: Path, report: Any, systems: list[str], divergence: str | None) -> bool:
    """Write the report as a page. Return False, with the error on stderr, where that fails: the
    result stands."""
    from reshard.parity.html import html_report

    try:
        write_page(page, html_report(report, systems, divergence))
    except OSError as error:
        click.echo(f"Error: --html: cannot write {page}: {error.strerror}", err=True)
        return False
    return True
