"""Measure the smallest fault that fails the parity gate, in each dtype.

    python -m benchmarks.parity.sensitivity trained HF_DIRECTORY --folder /tmp/sensitivity --json trained.json
    python -m benchmarks.parity.sensitivity random qwen3 qwen3-moe deepseek-v3 --folder /tmp/sensitivity
        --json random.json

A is transformers with a fault in its weights or settings, B is Megatron-Core with the converted
weights, both on the default prompts and at far positions. A fault that has a size is made ten times
smaller until the gate lets it pass; the others are there or not. `fp32` and `bf16` are two
checkpoints, both of which can be run in fp32; `bf16 engine` is a B of which there are the bf16
logprobs alone, as of an engine that is running; the other columns are a B with weights as
``mcore-to-hf --quantize`` rounds them, converted back, against what the gate estimates of that
rounding. The sound model, which must pass, is the first row.
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

SIZES = [10.0**-power for power in range(6)]
QUANTIZED = {"fp8": "fp8", "int4_per_group_32": "int4", "nvfp4": "fp4"}
Runs = dict[str, Any]


class Fault(NamedTuple):
    """A change of transformers' modules by a size, or, where `sizes` has one entry, as it is."""

    name: str
    apply: Callable[[torch.nn.Module, float], None]
    sizes: list[float]


def middle_layer(module: torch.nn.Module) -> torch.nn.Module:
    layers = module.model.layers
    return layers[len(layers) // 2]


def scaled(pick: Callable[[torch.nn.Module], torch.Tensor]) -> Callable[[torch.nn.Module, float], None]:
    def apply(module: torch.nn.Module, size: float) -> None:
        pick(module).data.mul_(1 + size)

    return apply


def other_theta(module: torch.nn.Module, size: float) -> None:
    frequencies = module.model.rotary_emb.inv_freq
    steps = torch.arange(len(frequencies)) / len(frequencies)
    frequencies.mul_((1 + size) ** -steps)


def other_epsilon(module: torch.nn.Module, size: float) -> None:
    for norm in module.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.variance_epsilon *= 1 + size


def exchanged_heads(module: torch.nn.Module, size: float) -> None:
    attention = middle_layer(module).self_attn
    queries = getattr(attention, "q_proj", None) or attention.q_b_proj
    weight = queries.weight.data
    width = getattr(attention, "head_dim", None) or attention.qk_head_dim
    first = weight[:width].clone()
    weight[:width] = weight[width : 2 * width]
    weight[width : 2 * width] = first


def exchanged_queries_and_keys(module: torch.nn.Module, size: float) -> None:
    attention = middle_layer(module).self_attn
    keys = attention.k_proj.weight.data
    queries = attention.q_proj.weight.data[: len(keys)]
    saved = keys.clone()
    keys.copy_(queries)
    queries.copy_(saved)


def exchanged_experts(module: torch.nn.Module, size: float) -> None:
    experts = middle_layer(module).mlp.experts
    for parameter in experts.parameters(recurse=False):
        parameter.data[[0, 1]] = parameter.data[[1, 0]]


def next_bf16(module: torch.nn.Module, size: float) -> None:
    """Every element of a tensor to the next number of bf16 away from zero."""
    weight = middle_layer(module).self_attn.o_proj.weight.data
    codes = weight.bfloat16().view(torch.int16) + 1
    weight.copy_(codes.view(torch.bfloat16).to(weight.dtype))


def one_element(module: torch.nn.Module, size: float) -> None:
    """One element of a matrix by its tensor's largest, which is what a torn write leaves at least."""
    weight = middle_layer(module).self_attn.o_proj.weight.data
    weight[0, 0] += size * weight.abs().max()


def faults_of(module: torch.nn.Module) -> list[Fault]:
    layer = middle_layer(module)
    faults = [
        Fault("none", lambda module, size: None, [0.0]),
        Fault("one matrix scaled by 1 + x", scaled(lambda m: middle_layer(m).self_attn.o_proj.weight), SIZES),
        Fault("one norm scaled by 1 + x", scaled(lambda m: middle_layer(m).input_layernorm.weight), SIZES),
        Fault("rope theta times 1 + x, the config silent", other_theta, SIZES),
        Fault("norm epsilons times 1 + x, the config silent", other_epsilon, [100.0, 10.0, *SIZES]),
        Fault("one element off by x of the largest", one_element, SIZES),
        Fault("two query heads of a layer exchanged", exchanged_heads, [0.0]),
        Fault("one matrix one bf16 ulp up", next_bf16, [0.0]),
    ]
    if hasattr(layer.self_attn, "k_proj"):
        faults.append(Fault("queries and keys of a layer exchanged", exchanged_queries_and_keys, [0.0]))
    if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
        faults.append(Fault("two experts of a layer exchanged", exchanged_experts, [0.0]))
        faults.append(
            Fault("a router scaled by 1 + x", scaled(lambda m: middle_layer(m).mlp.gate.weight), SIZES)
        )
    return faults


@contextmanager
def faulty(module: torch.nn.Module, fault: Fault, size: float) -> Iterator[None]:
    """While it is open, the module has the fault."""
    names = ("weight", "inv_freq", "original_inv_freq")
    saved = {
        name: tensor.clone()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if f"layers.{len(module.model.layers) // 2}." in name or name.split(".")[-1] in names[1:]
    }
    epsilons = {norm: norm.variance_epsilon for norm in module.modules() if hasattr(norm, "variance_epsilon")}
    with torch.no_grad():
        fault.apply(module, size)
    try:
        yield
    finally:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in saved:
                tensor.data.copy_(saved[name])
        for norm, epsilon in epsilons.items():
            norm.variance_epsilon = epsilon


def measure(name: str, hf: Path, folder: Path) -> dict:
    """The smallest size that is seen, by fault and column."""
    from reshard import hf_to_mcore, mcore_to_hf
    from reshard.megatron.layout import MegatronLayout
    from reshard.models.model import Model
    from reshard.parity import random_prompts
    from reshard.parity.prompts import far_prompt
    from reshard.parity.rounding import Rounding, rounded
    from reshard.parity.systems.base import ScoringOptions, System, scores_of
    from reshard.parity.systems.huggingface import HuggingFace
    from reshard.parity.systems.megatron import Megatron
    from reshard.parity.systems.processes import join_processes
    from reshard.storage.sources.base import read_config

    join_processes()
    hf_to_mcore(hf, folder / "mcore", transformer_impl="local")
    model = Model.from_hf(read_config(hf / "config.json"))
    context = int(model.config["max_position_embeddings"])
    prompts = random_prompts(8, model.symbols["V"], [min(n, context) for n in (16, 64, 128)])
    reach = far_prompt(model, max(map(len, prompts)))
    how = ScoringOptions(routing=model.num_experts > 0)

    def run(system: System) -> Runs:
        far = None
        if reach is not None:
            far = scores_of(system, [reach.prompt], ScoringOptions(positions=reach.positions))
        return {"scores": scores_of(system, prompts, how), "far": far}

    def run_mcore(path: Path, dtype: str) -> Runs:
        with closing(Megatron(path, dtype, MegatronLayout())) as system:
            return run(system)

    sound = {dtype: run_mcore(folder / "mcore", dtype) for dtype in ("fp32", "bf16")}
    for way in QUANTIZED:
        try:
            mcore_to_hf(folder / "mcore", folder / way, quantize=way, dtype="bf16")
            hf_to_mcore(folder / way, folder / f"{way}-mcore", transformer_impl="local")
            sound[way] = run_mcore(folder / f"{way}-mcore", "bf16")
        except Exception as error:
            print(f"{name}: {way} left out: {error}", flush=True)
    systems = {dtype: HuggingFace(hf, dtype) for dtype in ("fp32", "bf16")}
    estimates = {}
    for way, kind in QUANTIZED.items():
        if way in sound:
            system = HuggingFace(hf, "bf16")
            with closing(system), rounded(system, Rounding(kind, None, 32 if kind == "int4" else None)):
                estimates[way] = run(system)
    exact = run(systems["fp32"])
    result: dict = {
        "model": name,
        "tokens": sum(map(len, prompts)) - len(prompts),
        "context": context,
        "faults": {},
    }
    for fault in faults_of(systems["fp32"].module):
        rows = dict.fromkeys(("fp32", "bf16", "bf16 engine", *estimates))
        figures: dict = {}
        open_columns = set(rows)
        for size in fault.sizes:
            a = {}
            for dtype, system in systems.items():
                with faulty(system.module, fault, size):
                    a[dtype] = run(system)
            seen = decide(a, sound, exact, estimates, model)
            for column in sorted(open_columns):
                figures.setdefault(column, {})[f"{size:g}"] = seen[column][1]
                if seen[column][0]:
                    rows[column] = size
                else:
                    open_columns.discard(column)
            if not open_columns:
                break
        result["faults"][fault.name] = {"smallest": rows, "figures": figures}
        print(name, fault.name, rows, {c: list(f.values())[-1] for c, f in figures.items()}, flush=True)
    for system in systems.values():
        system.close()
    return result


def decide(a: Runs, sound: Runs, exact: Runs, estimates: Runs, model: Any) -> dict[str, tuple[bool, str]]:
    """By column: does the gate fail, and the figure that it went by."""
    from reshard.parity import Limits, metrics_of
    from reshard.parity.metrics import routing_of
    from reshard.parity.noise import noise_of

    def margin(one: Runs, other: Runs) -> float | None:
        routing = routing_of(one["scores"], other["scores"], model)
        return None if routing is None else routing.margin

    metrics = metrics_of(a["fp32"]["scores"], sound["fp32"]["scores"])
    routing = routing_of(a["fp32"]["scores"], sound["fp32"]["scores"], model)
    limits = Limits.of_dtype("fp32")
    exceeded = limits.exceeded(metrics, routing)
    if a["fp32"]["far"] is not None:
        exceeded += limits.exceeded_at_far_positions(metrics_of(a["fp32"]["far"], sound["fp32"]["far"]))
    decisions = {"fp32": (bool(exceeded), f"mean_abs {metrics.mean_abs:.2g}, max_abs {metrics.max_abs:.2g}")}

    def against(
        column: str, b: Runs, errors: tuple, bases: tuple, fp32: tuple, margins: list, far: Any = None
    ) -> None:
        same_kind = column.startswith("bf16")
        noise = noise_of(a["bf16"]["scores"], b["scores"], errors, bases, fp32, same_kind)
        assert noise is not None
        worst = max((m for m in margins if m is not None), default=None)
        limits = Limits.of_dtype("bf16" if same_kind else "fp8").with_noise(noise, worst)
        metrics = metrics_of(a["bf16"]["scores"], b["scores"])
        sentences = limits.exceeded(metrics, routing_of(a["bf16"]["scores"], b["scores"], model), noise)
        figure = f"{noise.ratio:.3g} ({noise.low:.3g} to {noise.high:.3g})"
        if noise.in_fp32 is not None:
            figure += f", {noise.in_fp32:.2g} in fp32"
        if far is not None:
            sentences += far.left_in_fp32
            figure += f", {far.in_fp32:.2g} far"
        decisions[column] = bool(sentences), figure

    one, b = a["bf16"], sound["bf16"]
    far = None
    if one["far"] is not None:
        pair, fp32 = (one["far"], b["far"]), (a["fp32"]["far"], sound["fp32"]["far"])
        far = noise_of(*pair, pair, fp32, fp32)
    both = (a["fp32"]["scores"], sound["fp32"]["scores"])
    margins = [margin(one, a["fp32"]), margin(b, sound["fp32"])]
    against("bf16", b, (one["scores"], b["scores"]), both, both, margins, far)
    against("bf16 engine", b, (one["scores"], None), (both[0], None), (None, None), margins[:1])
    for way, estimate in estimates.items():
        errors, bases = (one["scores"], estimate["scores"]), (both[0], exact["scores"])
        against(way, sound[way], errors, bases, (None, None), [None])
    return decisions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("trained", "random"))
    parser.add_argument("models", nargs="+", help="directories, or variants of tests/tools/checkpoints.py")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.models:
        folder = options.folder / Path(name).name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        hf = Path(name)
        if options.kind == "random":
            from tests.tools.checkpoints import make

            hf = make(folder / "hf", name, torch.bfloat16)
        results.append(measure(Path(name).name, hf, folder))
        shutil.rmtree(folder)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    table(results)


def table(results: list[dict]) -> None:
    """Print a Markdown table of each model."""
    for result in results:
        columns = list(next(iter(result["faults"].values()))["smallest"])
        print(f"\n{result['model']}, {result['tokens']} tokens\n\n| fault | {' | '.join(columns)} |")
        print("|---|" + "---|" * len(columns))
        for fault, row in result["faults"].items():
            cells = [_cell(row["smallest"][column], row["figures"]) for column in columns]
            print(f"| {fault} | {' | '.join(cells)} |")


def _cell(size: float | None, figures: dict) -> str:
    if size is None:
        return "passes"
    return "seen" if size == 0 else f"{size:g}" if not math.isinf(size) else "-"


if __name__ == "__main__":
    main()
