"""The gate: score the same prompts in two systems, measure their difference, and hold it against
limits."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from reshard.core.errors import OptionError, ReshardError
from reshard.core.extras import require
from reshard.engines.layout import EngineLayout
from reshard.megatron.configs import config_differences, sentences_on
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model
from reshard.parity.limits import Limits
from reshard.parity.metrics import Scores, metrics_of, routing_of
from reshard.parity.noise import Noise
from reshard.parity.prompts import Prompt, check_prompts, far_prompt, random_prompts
from reshard.parity.report import ParityReport
from reshard.parity.routing import Routing
from reshard.parity.served import ENGINES, engine_of
from reshard.storage.sources.hf_hub import config_path

if TYPE_CHECKING:
    from reshard.parity.comparison import SystemComparison
    from reshard.parity.systems.base import System, SystemOptions


def parity(
    a: "str | Path | System",
    b: "str | Path | System",
    prompts: Sequence[Prompt] | int = 8,
    *,
    dtype: str | None = None,
    layout: MegatronLayout | None = None,
    engine: EngineLayout | None = None,
    hf_config: str | Path | None = None,
    limits: Limits | Callable[[str], Limits] | None = None,
    lengths: Sequence[int] = (16, 64, 128),
    seed: int = 0,
    batch_size: int = 1,
    packed: bool = False,
    routing: bool = True,
    noise: bool | None = None,
    reach: bool = True,
    quantization: str | None = None,
    match_vllm_rounding: bool = False,
    why: bool = False,
) -> ParityReport:
    """Score prompts in two systems and compare their logprobs.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron
    checkpoints, which Megatron-Core runs at `layout` (under torchrun where that has several ranks).
    With ``vllm:`` before it vLLM serves it at `engine` (default: TP over all processes): a Hugging
    Face directory as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core. With
    ``sglang:`` SGLang serves a Hugging Face directory, or, after ``sglang:http://``, a server answers
    that runs already. Either may also be a `reshard.parity.LiveVllm` or a `reshard.parity.LiveSglang`.

    - `prompts` are token ids, or how many random ones to make, of `lengths` in turn; `batch_size`
      of them go together, padded, or `packed` into one sequence. With `reach` one more stands at
      positions as far as the context goes, where both systems take positions.
    - `dtype` is ``fp32`` (default without a GPU) or ``bf16``. `limits` may be a function of it, or
      of ``fp8`` where an engine serves quantized weights.
    - `quantization` is what vLLM is started with, besides what a config says. With
      `match_vllm_rounding` a refit rounds as vLLM's own loading does.
    - `routing` compares the experts that tokens go to.
    - The rounding of either system is measured where the dtype is not fp32, by running its
      checkpoint in fp32 too, unless `noise` is False. Where it is True, A is also scored again, and of
      fp32 in bf16.
    - `why` runs the systems further, to say how much of their difference each cause makes.

    Raises ReshardError if a system cannot be opened, the two do not have the same vocabulary, a
    prompt does not fit, or logprobs are missing, NaN or infinite.
    """
    require("parity", "torch")
    from reshard.parity.comparison import SystemComparison
    from reshard.parity.systems.processes import joined_processes

    a, b = (str(side) if isinstance(side, Path) else side for side in (a, b))
    options = _system_options(a, b, dtype, layout, engine, hf_config, quantization, match_vllm_rounding)
    limits_by_kind = _limits_by_kind(limits or Limits.of_dtype, options.dtype, a, b)
    comparison = SystemComparison(a, b, options)
    check_ignored(*comparison.models)
    _check_same_architecture(*comparison.models)
    prompts = _checked_prompts(comparison.models, prompts, lengths, seed)
    far = far_prompt(comparison.models[0], max(map(len, prompts)), seed) if reach else None
    comparison.prepare(prompts, far, batch_size, packed, routing)
    with joined_processes():
        return _scored(comparison, limits_by_kind, noise, why)


def _scored(
    comparison: "SystemComparison", limits: Mapping[str, Limits], noise: bool | None, why: bool
) -> ParityReport:
    """Score both systems, and what measures their rounding, and report it; with `why` the causes too."""
    from reshard.parity.causes.search import find_causes
    from reshard.parity.coverage import not_looked_at

    measured_noise, unseen = comparison.run(noise), not_looked_at(comparison)
    report = _report(comparison, limits["fp8" if comparison.quantized else comparison.dtype], measured_noise)
    report.not_looked_at = unseen
    report.causes = find_causes(comparison) if why else None
    return report


def _system_options(
    a: "str | System",
    b: "str | System",
    dtype: str | None,
    layout: MegatronLayout | None,
    engine: EngineLayout | None,
    hf_config: str | Path | None,
    quantization: str | None,
    match_vllm_rounding: bool,
) -> "SystemOptions":
    """Return the options with which both systems are opened. Raises ReshardError for those that are none, or for
    another kind of system."""
    from reshard.parity.systems.base import SystemOptions

    dtype = _checked_dtype(dtype)
    _check_engine_options(a, b, engine, quantization, match_vllm_rounding)
    _check_megatron_options(a, b, layout, hf_config)
    config = config_path(hf_config) if hf_config is not None else None
    return SystemOptions(dtype, checked_layout(layout), config, engine, quantization, match_vllm_rounding)


def _checked_dtype(dtype: str | None) -> str:
    """Return the dtype to score in. Raises ReshardError for one that systems are not run in."""
    import torch

    from reshard.parity.systems.base import DTYPES

    dtype = dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype


def _checked_prompts(
    models: Sequence[Model], prompts: Sequence[Prompt] | int, lengths: Sequence[int], seed: int
) -> Sequence[Prompt]:
    """Return the prompts, made at random where only their number is given. Raises ReshardError for
    one that a model cannot take."""
    context = min(int(model.config["max_position_embeddings"]) for model in models)
    vocabulary = models[0].symbols["V"]
    if isinstance(prompts, int):
        prompts = random_prompts(prompts, vocabulary, [min(n, context) for n in lengths], seed)
    check_prompts(prompts, vocabulary, context)
    return prompts


def _report(comparison: "SystemComparison", limits: Limits, noise: Noise | None) -> ParityReport:
    """Compute the figures of a comparison that was run, and hold them against the limits."""
    import torch.distributed as dist

    scores_a, scores_b = comparison.runs["A"], comparison.runs["B"]
    model = comparison.models[0]
    overall, fields = metrics_of(scores_a, scores_b), config_differences(*comparison.models)
    routing, not_compared = _routing(scores_a, scores_b, model, fields)
    margins = [compared.margin for compared in comparison.routings if compared is not None]
    limits = limits.with_noise(noise, max(margins, default=None))
    unmeasured = limits.unmeasured(overall, routing, noise)
    if not model.num_experts or not_compared:
        unmeasured.pop("routing_margin", None)
    exceeded = sentences_on(fields) + limits.exceeded(overall, routing, noise)
    far_sentences = _exceeded_at_far_positions(comparison, limits)
    exceeded += [f"at {comparison.covered}: {sentence}" for sentence in far_sentences]
    per_prompt = [metrics_of([x], [y]) for x, y in zip(scores_a, scores_b, strict=True)]
    scores_a, scores_b = (
        [replace(scores, distributions=None) for scores in run] for run in (scores_a, scores_b)
    )
    return ParityReport(
        a=comparison.names["A"],
        b=comparison.names["B"],
        dtype=comparison.dtype,
        overall=overall,
        prompts=per_prompt,
        limits=limits,
        exceeded=exceeded,
        noise=comparison.noise,
        routing=routing,
        scores_a=scores_a,
        scores_b=scores_b,
        tokens=comparison.prompts,
        first_process=dist.get_rank() == 0,
        unmeasured=[*unmeasured.values(), *not_compared, *comparison.notes],
        quantized=comparison.quantized,
        rounding=noise,
        fields=fields,
        reach=comparison.reach,
        far=comparison.far,
        covered=comparison.covered,
    )


def _routing(
    a: Sequence[Scores], b: Sequence[Scores], model: Model, fields: Mapping[str, Any]
) -> tuple[Routing | None, list[str]]:
    """Compare the experts that tokens went to. None, with a sentence, where the configs differ and the choices
    cannot be compared: the `fields` say more than that."""
    try:
        return routing_of(a, b, model), []
    except ReshardError as error:
        if not fields:
            raise
        return None, [f"the experts were not compared, since the configs differ: {error}"]


def _exceeded_at_far_positions(comparison: "SystemComparison", limits: Limits) -> list[str]:
    """Return a sentence for each limit that the far positions exceed. Where rounding was measured
    there, only what is left in fp32 counts."""
    noise, far = comparison.far_noise(), comparison.far
    if far is None:
        return []
    if noise is not None:
        return noise.left_in_fp32
    return limits.exceeded_at_far_positions(far) if comparison.dtype == "fp32" else []


def _is_served(side: "str | System") -> TypeGuard[str]:
    return isinstance(side, str) and bool(engine_of(side))


def _check_engine_options(
    a: "str | System",
    b: "str | System",
    engine: EngineLayout | None,
    quantization: str | None,
    match_vllm_rounding: bool,
) -> None:
    """Raise ReshardError for options of an engine that neither system has."""
    from reshard.parity.systems.opening import is_megatron

    served = [side for side in (a, b) if _is_served(side)]
    if engine is not None and not served:
        raise OptionError(f"engine {engine} is for a system with vllm: or sglang: before it: neither has")
    if quantization is not None and not any(ENGINES[engine_of(side)].quantizes for side in served):
        raise OptionError(f"quantization {quantization} is for a system with vllm: before it: neither has")
    if match_vllm_rounding and not any(map(is_megatron, served)):
        raise ReshardError(
            "match_vllm_rounding is for a vLLM that is refitted, vllm: and a Megatron checkpoint: neither system is one"
        )


def _check_megatron_options(
    a: "str | System", b: "str | System", layout: MegatronLayout | None, hf_config: str | Path | None
) -> None:
    """Raise ReshardError for a layout, or a config to read a checkpoint with, where neither system is a Megatron
    checkpoint."""
    from reshard.parity.systems.opening import is_megatron

    of_layout = [] if checked_layout(layout) == MegatronLayout() else [f"layout {layout}"]
    given = of_layout + [f"hf_config {hf_config}"] * (hf_config is not None)
    paths = [side for side in (a, b) if isinstance(side, str)]
    if given and len(paths) == 2 and not any(map(is_megatron, paths)):
        raise ReshardError(f"{given[0]} is for a Megatron checkpoint: neither {a} nor {b} is one")


def _limits_by_kind(
    limits: Limits | Callable[[str], Limits], dtype: str, a: "str | System", b: "str | System"
) -> dict[str, Limits]:
    """Return the limits for the dtype, and for ``fp8`` where an engine may serve quantized weights."""
    by_kind = {dtype: _checked_limits(limits, dtype)}
    by_kind["fp8"] = by_kind[dtype]
    if not all(isinstance(side, str) and not _is_served(side) for side in (a, b)):
        with suppress(KeyError):  # a caller's function may know dtypes only
            by_kind["fp8"] = _checked_limits(limits, "fp8")
    return by_kind


def _checked_limits(limits: Limits | Callable[[str], Limits], kind: str) -> Limits:
    """Return the limits for fp32, bf16 or fp8. Raises ReshardError if they cannot fail, or are
    no `Limits`."""
    chosen = limits if isinstance(limits, Limits) else limits(kind)
    if not isinstance(chosen, Limits):
        raise ReshardError(f"limits gives a {type(chosen).__name__} for {kind}, not reshard.parity.Limits")
    chosen.check()
    return chosen


def _check_same_architecture(a: Model, b: Model) -> None:
    """Raise ReshardError if two systems cannot hold the same model."""
    architecture_a, architecture_b = a.family.architecture, b.family.architecture
    if architecture_a != architecture_b:
        raise ReshardError(f"A is a {architecture_a}, B a {architecture_b}: they do not hold the same model")
    if a.symbols["V"] != b.symbols["V"]:
        raise ReshardError(
            f"A has a vocabulary of {a.symbols['V']} tokens, B of {b.symbols['V']}: they do not hold the same model"
        )
