"""Parity as an assertion, and pytest fixtures, for the tests of projects that convert or train.

    from reshard.testing import assert_logprob_parity, to_megatron  # noqa: F401

    def test_the_export_is_the_model(to_megatron):
        assert_logprob_parity("checkpoints/hf", to_megatron("checkpoints/hf"), max_abs=1e-4)

Megatron-Core with its local layers runs on a machine without a GPU, in this process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reshard.core.errors import ReshardError
from reshard.megatron.layout import MegatronLayout
from reshard.parity.gate import parity
from reshard.parity.limits import Limits
from reshard.parity.metrics import Metrics
from reshard.parity.prompts import tokenizer_of
from reshard.parity.report import ParityReport
from reshard.storage.convert import hf_to_mcore

if TYPE_CHECKING:
    from reshard.parity.systems.base import System


def assert_logprob_parity(
    a: "str | Path | System",
    b: "str | Path | System",
    *,
    max_abs: float | None = None,
    mean_abs: float | None = None,
    token_mult_prob_error: float | None = None,
    kl: float | None = None,
    argmax_agreement: float | None = None,
    routing_margin: float | None = None,
    noise_ratio: float | None = None,
    texts: Sequence[str] | None = None,
    **options: Any,
) -> ParityReport:
    """Fail unless two systems give the same logprobs; return the report if they do.

    The systems and `options` are those of `reshard.parity.parity`; `texts` are prompts for the
    tokenizer beside one of the two. A limit given here replaces the dtype's default, and fails on a
    figure that was not measured.

    Raises AssertionError with the figures, and, for a Hugging Face directory and a Megatron
    checkpoint, with the module where they diverge; ReshardError where the two cannot be compared.
    """
    given = {"max_abs": max_abs, "mean_abs": mean_abs, "token_mult_prob_error": token_mult_prob_error, "kl": kl,
             "argmax_agreement": argmax_agreement, "routing_margin": routing_margin,
             "noise_ratio": noise_ratio}  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    side_a, side_b = (str(side) if isinstance(side, Path) else side for side in (a, b))
    if texts is not None:
        options["prompts"] = _tokens_of(texts, [side for side in (side_a, side_b) if isinstance(side, str)])
    report = parity(side_a, side_b, limits=lambda dtype: Limits.of_dtype(dtype, **chosen), **options)
    if not report.ok:  # no `assert` statement, which python -O drops
        raise AssertionError(
            f"{report.a} and {report.b}: {'; '.join(report.exceeded)} (worst prompts: {_worst(report.prompts)})"
            f"{_divergence(side_a, side_b, report, options)}"
        )
    return report


def _tokens_of(texts: Sequence[str], systems: Sequence[str]) -> list[list[int]]:
    encode = tokenizer_of(systems)
    if encode is None:
        raise ReshardError(f"texts need a tokenizer, and beside {' and '.join(systems)} there is none")
    return [encode(text) for text in texts]


def _divergence(a: "str | System", b: "str | System", report: ParityReport, options: dict[str, Any]) -> str:
    """Return the end of a sentence on where the two diverge; empty if their modules cannot be
    compared."""
    from reshard.parity.divergence import describe_divergence, find_divergence

    if not isinstance(a, str) or not isinstance(b, str):
        return ""
    prompt, positions = report.diverging_prompt
    shared = {name: options[name] for name in ("layout", "hf_config") if name in options}
    try:
        return (
            "; "
            f"{describe_divergence(find_divergence(a, b, prompt, dtype=report.dtype, positions=positions, **shared))}"
        )
    except ReshardError:
        return ""  # two of a kind, or an engine: only the figures are known


def _worst(prompts: list[Metrics]) -> str:
    order = sorted(range(len(prompts)), key=lambda i: -prompts[i].mean_abs)[:3]
    return ", ".join(f"{i} with mean_abs {prompts[i].mean_abs:.3g}" for i in order)


@pytest.fixture
def to_megatron(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that converts a Hugging Face directory or hub id into a temporary Megatron
    checkpoint, at a layout."""
    destinations: list[Path] = []

    def convert(source: str | Path, layout: MegatronLayout | None = None) -> Path:
        destinations.append(tmp_path / f"megatron-{len(destinations)}")
        hf_to_mcore(str(source), destinations[-1], layout or MegatronLayout(), transformer_impl="local")
        return destinations[-1]

    return convert
