"""Refits between real Megatron models and the real model classes of an engine, run and held against what
the engine's own loader makes of the export, and against the plan."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard import MegatronLayout, VllmLayout, plan_refit, read_model
from reshard.engines.layout import EngineLayout
from reshard.engines.sglang.weights.layout import SglangLayout
from tests import install_sglang_cpu
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks

PATTERN = "--hybrid-layer-pattern"  # of cases in test_hybrid.py


class IntoEngine(NamedTuple):
    """How refits into an engine are run: the module of its ranks, the Python that has its packages, with
    its environment, and its layout, given the options of a case."""

    module: str
    python: Callable[[], str]
    environment: Callable[[], Mapping[str, str]]
    layout: Callable[[dict], EngineLayout]


def vllm_layout(engine: dict) -> VllmLayout:
    """vLLM's layout of a case."""
    by_turns = engine.get("expert_placement_strategy") == "round_robin"
    sizes = [engine.get(name, 1) for name in ("tp", "pp", "dp")]
    return VllmLayout(*sizes, engine.get("enable_expert_parallel", False), by_turns)


ENGINES = {
    "vLLM": IntoEngine("refit_on_cpu", warm.python_of_ranks, lambda: os.environ, vllm_layout),
    "SGLang": IntoEngine(
        "refit_sglang_on_cpu",
        warm.python_of_sglang,
        install_sglang_cpu.environment_of_engine,
        lambda engine: SglangLayout(**{name: engine.get(name, 1) for name in ("tp", "pp", "dp", "ep")}),
    ),
}

# What vLLM keeps beside packed codes, which no weights change.
ALIKE = ("_shape", "_zero_point", "g_idx", "_sort_indices")
TOWERS = ("visual.", "vision_tower.", "mm_projector.")  # which both checkpoints share


def refit(
    checkpoints,
    parallel: str,
    trainers: int,
    engine: dict,
    engines: int,
    together: bool,
    folder,
    sides: dict | None = None,
    into: str = "vLLM",
    **options,
):
    """Run it into an engine, and check what every engine rank holds after each refit; the reports."""
    Path(folder).mkdir(exist_ok=True)
    sides = {
        "trainer": trainers,
        "engine": engines,
        "together": together,
        "folder": str(folder),
        "port": free_port(),
        **(sides or {}),
    }
    arguments = (sides, flags_at(Path(checkpoints[0][1]), parallel), checkpoints, engine)
    results = run_on_ranks(
        trainers if together else trainers + engines,
        "refit_twice",
        *arguments,
        module=ENGINES[into].module,
        python=ENGINES[into].python(),
        environment=ENGINES[into].environment(),
        options=options,
    )
    checked = 0
    for held, expected, moved, reports, version in results:
        assert version == 11 and len(reports) == 2
        if not expected:
            continue
        checked += 1
        assert not moved
        for now, loaded in zip(held, expected, strict=True):
            wrong = {name: (now.get(name), loaded[name]) for name in loaded if now.get(name) != loaded[name]}
            assert wrong == {} and now.keys() == loaded.keys(), wrong
        # The second refit must have brought other weights: nearly all of them differ between the checkpoints.
        assert not held[0] or sum(held[0][name] != held[1][name] for name in held[0]) > 0.6 * len(
            [
                n
                for n in held[0]
                if not n.endswith(ALIKE)
                and "scale" not in n
                and "cache" not in n
                and not n.startswith(TOWERS)
            ]
        )
    assert checked == engines
    if not options.keys() & {"traced", "backend"}:
        as_forecast(
            ENGINES[into].layout(engine),
            checkpoints[0][0],
            parallel,
            trainers,
            engine,
            together,
            [reports for held, _, _, reports, _ in results if held[0]],
            "published" in options and engine["hf_overrides"]["quantization_config"]["quant_method"] == "fp8",
        )
    return [reports for _, _, _, reports, _ in results]


SIZES = {TP: "tp", PP: "pp", VPP: "vpp", EP: "ep", ETP: "etp",
         "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
         "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage"}  # fmt: skip


def as_forecast(
    target: EngineLayout,
    checkpoint: str,
    parallel: str,
    trainers: int,
    engine: dict,
    together: bool,
    reports: list,
    encoded: bool,
) -> None:
    """A refit on simulated ranks must have moved just these bytes; of what travels `encoded` in fp8
    about half."""
    words = parallel.split()
    values = dict(zip(words[::2], words[1::2], strict=True))
    pattern = values.pop(PATTERN, None)
    shards, experts = (int(values.pop(f"--{e}tensor-parallel-num-weight-shards", 0)) for e in ("", "expert-"))
    sizes: dict = {SIZES[flag]: int(n) for flag, n in values.items()}
    if pattern is not None and "|" in pattern:
        # A Mamba layer stands alone; of an attention and an MLP the former stands for both.
        letters = dict.fromkeys(map(ord, "ME*-"), "t") if "M" in pattern else {ord("*"): "t", ord("-"): None}
        sizes["pipeline_model_parallel_layout"] = "E" + pattern.translate(letters) + "L"
    model = read_model(checkpoint)
    layout = MegatronLayout(**sizes)
    if shards or experts:
        sizes |= {"gtp": max(1, shards // layout.tp), "egtp": max(1, experts // layout.expert_tp)}
        layout = MegatronLayout(**sizes)
    dp = trainers // (layout.tp * layout.gtp * layout.pp)
    found = plan_refit(
        model,
        layout,
        target,
        dp=dp,
        colocated=together,
        gpus_per_host=64,
        make_vocab_size_divisible_by=8,
        transformer_impl="local",
    )
    assert [r["received_bytes_local"] for _, r in reports] == [r.local_bytes for r in found.ranks]
    for (_, report), rank in zip(reports, found.ranks, strict=True):
        routes = ("nccl", "relay", "nixl", "cuda_ipc")  # one or two of them: the last on a GPU
        came = sum(report.get(f"received_bytes_{route}", 0) for route in routes)
        if encoded and rank.host_bytes:
            # embedding, output and norms are as they were, and experts that vLLM arranges for a kernel
            assert 0.5 < came / rank.host_bytes <= (1 if "moe_backend" in engine else 0.7)
        elif engine.get("quantization") == "fp8_per_block":
            # the padding of blocks travels too
            assert (came > 0) == (rank.host_bytes > 0)
        else:
            assert came == rank.host_bytes
