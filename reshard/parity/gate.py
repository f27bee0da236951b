"""The gate: score the same prompts in two systems, measure, and hold the figures against limits."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from reshard.core.errors import ReshardError
from reshard.core.extras import require
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.parity.configs import config_differences, sentences_on
from reshard.parity.limits import Limits
from reshard.parity.metrics import metrics_of, routing_of
from reshard.parity.prompts import VLLM_PREFIX, Prompt, check_prompts, far_prompt, random_prompts
from reshard.parity.report import ParityReport

if TYPE_CHECKING:
    from reshard.parity.systems import System


def parity(
    a: "str | System",
    b: "str | System",
    prompts: Sequence[Prompt] | int = 8,
    *,
    dtype: str | None = None,
    layout: MegatronLayout | None = None,
    engine: VllmLayout | None = None,
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
    exact: bool = False,
) -> ParityReport:
    """Score prompts in two systems and compare.

    `a` and `b` are paths or hub ids: Hugging Face directories, which transformers runs, or Megatron
    checkpoints, which Megatron-Core runs at `layout` (under torchrun, where that has several ranks). With
    ``vllm:`` before it vLLM serves it, at `engine` (default: TP over all processes): a Hugging Face directory
    as vLLM loads it, a Megatron checkpoint by a refit from Megatron-Core. Either may also be a
    `reshard.parity.LiveVllm`. `prompts` are token ids, or how many random ones to make; `batch_size` of them
    go together, padded, or `packed` into one sequence. With `reach` one more prompt of a few tokens stands at positions
    as far as the context goes, where both systems take positions. `dtype` is ``fp32`` (default without a GPU) or
    ``bf16``; `limits` may be a function of it, or of ``fp8`` where an engine serves quantized weights.
    `quantization` is what vLLM is started with (beside what a config says), and `exact` rounds in a refit as
    vLLM's own loading does. `routing` compares the experts that tokens go to. What either system rounds is measured
    where the dtype is not fp32, by running its checkpoint there too, unless `noise` is False; where it is True A is also
    scored again, and of fp32 in bf16.

    Raises ReshardError where a system cannot be opened, the two do not have the same vocabulary, a prompt
    does not fit, or logprobs are missing, NaN or infinite.
    """
    require("parity", "torch")
    import torch
    import torch.distributed as dist

    from reshard.parity.comparison import Comparison
    from reshard.parity.opening import is_megatron
    from reshard.parity.systems import DTYPES, join_processes

    dtype = dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    if dtype not in DTYPES:
        raise ReshardError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if quantization is not None and not any(_is_started(side) for side in (a, b)):
        raise ReshardError(f"quantization {quantization} is for a system with vllm: before it: neither has")
    if exact and not any(_is_started(side) and is_megatron(side) for side in (a, b)):
        raise ReshardError(
            "exact is for a vLLM that is refitted, vllm: and a Megatron checkpoint: neither system is one"
        )
    plain = _limits(limits or Limits.of_dtype, dtype)
    rounded = plain
    if not all(isinstance(side, str) and not _is_started(side) for side in (a, b)):
        with suppress(KeyError):  # limits of one's own may know dtypes only
            rounded = _limits(limits or Limits.of_dtype, "fp8")
    join_processes()
    where = Path(hf_config) if hf_config is not None else None
    bench = Comparison(a, b, dtype, layout or MegatronLayout(), where, engine, quantization, exact)
    _check_same(*bench.models)
    fields = config_differences(*bench.models)
    context = min(int(model.config["max_position_embeddings"]) for model in bench.models)
    size = bench.models[0].symbols["V"]
    if isinstance(prompts, int):
        prompts = random_prompts(prompts, size, [min(n, context) for n in lengths], seed)
    tokens = list(prompts)
    check_prompts(tokens, size, context)
    longest = max(map(len, tokens))
    far = far_prompt(bench.models[0], longest, seed) if reach else None
    bench.prepare(tokens, far, batch_size, packed, routing)
    bench.score_both()
    if noise:
        bench.score_again()
    noise_wanted = (dtype != "fp32" or bench.quantized) and noise is not False
    measured = bench.measure_noise() if noise_wanted else None
    measured_far = bench.far_noise()
    one, two = bench.runs["A"], bench.runs["B"]
    overall, routed = metrics_of(one, two), routing_of(one, two, bench.models[0])
    each = [metrics_of([x], [y]) for x, y in zip(one, two, strict=True)]
    margins = [routed.margin for routed in bench.routings if routed is not None]
    limits = (rounded if bench.quantized else plain).with_noise(measured, max(margins, default=None))
    unmeasured = limits.unmeasured(overall, routed, measured)
    if not bench.models[0].num_experts:
        unmeasured.pop("routing_margin", None)
    notes = [*unmeasured.values(), *bench.notes]
    if noise_wanted and measured is None:
        notes.append(
            "the limits are absolute ones, since no rounding could be measured: they leave room for any model"
        )
    exceeded = sentences_on(fields) + limits.exceeded(overall, routed, measured)
    if bench.far is not None:
        beyond = limits.exceeded_at_far_positions(bench.far) if dtype == "fp32" else []
        if measured_far is not None:
            beyond = measured_far.left_in_fp32
        exceeded += [f"at {bench.covered}: {sentence}" for sentence in beyond]
    one, two = ([replace(s, distributions=None) for s in run] for run in (one, two))
    return ParityReport(
        a=bench.names["A"],
        b=bench.names["B"],
        dtype=dtype,
        overall=overall,
        prompts=each,
        limits=limits,
        exceeded=exceeded,
        noise=bench.noise,
        routing=routed,
        scores_a=one,
        scores_b=two,
        tokens=tokens,
        first_process=dist.get_rank() == 0,
        unmeasured=notes,
        quantized=bench.quantized,
        rounding=measured,
        fields=fields,
        reach=bench.reach,
        far=bench.far,
        covered=bench.covered,
    )


def _is_started(side: "str | System") -> TypeGuard[str]:
    return isinstance(side, str) and side.startswith(VLLM_PREFIX)


def _limits(limits: Limits | Callable[[str], Limits], kind: str) -> Limits:
    """Those for fp32, bf16 or fp8. Raises ReshardError where they cannot fail, or are none."""
    found = limits if isinstance(limits, Limits) else limits(kind)
    if not isinstance(found, Limits):
        raise ReshardError(f"limits gives a {type(found).__name__} for {kind}, not reshard.parity.Limits")
    found.check()
    return found


def _check_same(first: Model, model: Model) -> None:
    """Raise ReshardError where two systems cannot hold the same model."""
    one, other = first.family.architecture, model.family.architecture
    if one != other:
        raise ReshardError(f"A is a {one}, B a {other}: they do not hold the same model")
    if first.symbols["V"] != model.symbols["V"]:
        raise ReshardError(
            f"A has a vocabulary of {first.symbols['V']} tokens, B of {model.symbols['V']}: "
            f"they do not hold the same model"
        )
