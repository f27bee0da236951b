"""Models whose matrices an engine serves transposed are refitted: GPT-2, Llama 4 and gpt-oss from transformers. Bit for
bit what vLLM's own loader makes of the saved model."""

import pytest
import torch

from reshard import diff, digest
from reshard.delta import apply
from tests import install_sglang_cpu
from tests.refit.test_without_table import sides
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make as make_published
from tests.tools.model_classes import make

EP = {"tp": 2, "enable_expert_parallel": True}
# vLLM switches it off by itself where its context is short, and connect compares the configs.
SCALED = {"override_generation_config": {"attn_temperature_tuning": True}}
GPT2, LLAMA4, GPT_OSS = "GPT2LMHeadModel", "Llama4ForCausalLM", "gpt-oss"
# By the trainer's ranks, the engine's, and whether they are the same processes: the mesh, the cases by class and the
# engine's options, and the options of the refit.
RUNS = {
    (2, 2, True): (
        {"shard": 2},
        {"GPT-2": (GPT2, {"tp": 2}), "Llama 4": (LLAMA4, {"tp": 2} | SCALED), "Llama 4 EP": (LLAMA4, EP | SCALED),
         "gpt-oss": (GPT_OSS, {"tp": 2}), "gpt-oss EP": (GPT_OSS, EP)},
        {"round_bytes": 1 << 16},
    ),
    (2, 1, False): (
        {"replicate": 2, "shard": 1},
        {"GPT-2": (GPT2, {}), "Llama 4": (LLAMA4, SCALED), "gpt-oss": (GPT_OSS, {})},
        {"dtype": torch.float32, "backend": "nccl", "delta": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function from a class to two checkpoints of a model of it."""
    made: dict[str, list[str]] = {}

    def get(name: str) -> list[str]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = [
                str(make_published(folder / str(seed), name, torch.bfloat16, seed=seed))
                if name == GPT_OSS
                else str(make(folder / str(seed), name, seed))
                for seed in (0, 1)
            ]
        return made[name]

    return get


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_engine_serves_the_transposes_of_what_arrives_at_each_refit(run, checkpoints, tmp_path):
    trainers, engines, together = run
    mesh, classes, options = RUNS[run]
    cases = {case: (checkpoints(name), engine) for case, (name, engine) in classes.items()}
    ranks = trainers if together else trainers + engines
    results = run_on_ranks(
        ranks,
        "refit_in_turn",
        sides(tmp_path, *run),
        mesh,
        cases,
        module="refit_turned_on_cpu",
        options=options,
    )
    served = [of for of in results if of]
    assert len(served) == engines
    for of in served:
        for case in cases:
            one = of[case]
            (second, first), (expected, expected_first) = one["held"], one["expected"]
            assert {key for key in expected if second[key] != expected[key]} == set(), case
            assert {key for key in expected if first[key] != expected_first[key]} == set(), case
            others = [key for key in expected if expected[key] != expected_first[key]]
            assert len(others) >= 0.5 * len(expected), "other weights"
            assert one["matrices"] >= 8, "of each of two layers"
            if "round_bytes" in options:
                assert one["rounds"] > 1 and one["slab"] <= options["round_bytes"], case
            assert "brought" in one["accounts"]
            assert all(refitted == of_directory for refitted, of_directory in one["digests"])
            assert len({*one["digests"]}) == 2
            changed = [before != after for before, after in one["sums"].values()]
            assert sum(changed) >= one["matrices"], "an element of each"
            assert "rearranged or quantized, and deltas are of plain weights" in one["deltas"]
            assert "as something else than what was published" in one["as published"]
            assert one["handed on"] == (first if together else None)


def test_a_wrong_transpose_is_seen(checkpoints, tmp_path):
    cases = {GPT2: (checkpoints(GPT2), {"tp": 2}), GPT_OSS: (checkpoints(GPT_OSS), EP)}
    for of in run_on_ranks(2, "faults", sides(tmp_path, 2, 2, True), cases, module="refit_turned_on_cpu"):
        for name, said in of.items():
            for fault in ("exchanged", "as_published", "nowhere"):
                sentence, ready = said[fault]
                assert "did not arrive as they are in the trainer" in sentence and not ready, (name, fault)
            assert "loader does not fill" in said["another stride"][0], said["another stride"]


@pytest.mark.parametrize(("run", "backend"), [((2, 2, True), "auto"), ((2, 2, False), "nccl")], ids=str)
def test_an_engine_without_memory_is_named_by_all_at_once(run, backend, checkpoints, tmp_path):
    trainers, engines, together = run
    ranks = trainers if together else trainers + engines
    arguments = sides(tmp_path, *run), checkpoints(GPT_OSS), {"tp": 2}, backend
    results = run_on_ranks(ranks, "without_memory", *arguments, module="refit_turned_on_cpu")
    for rank, said in enumerate(results):
        assert "out of memory" in said["slab"][0]
        for step in ("write", "mismatches"):
            sentence, ready = said[step]
            assert (
                "vLLM cannot make what it serves of what has arrived (OutOfMemoryError: CUDA out of memory"
                in sentence
            )
            assert (
                sentence.startswith("vLLM")
                or f"inference rank {0 if together else trainers}: vLLM" in sentence
            )
            assert "silent" not in sentence and not ready
        assert said[""] == ("no error", rank >= ranks - engines)


def test_what_a_trainer_holds_transposed_has_the_digest_of_what_it_saves(checkpoints, tmp_path):
    cases = {name: (checkpoints(name), f"{tmp_path}/{name}") for name in (GPT2, LLAMA4, GPT_OSS)}
    places = sides(tmp_path, 2, 2, True)
    for of in run_on_ranks(2, "read_as_published", places, cases, module="refit_turned_on_cpu"):
        assert of == {
            name: tuple(digest(one).text for one in of_name) for name, (of_name, _) in cases.items()
        }
    for name, ((first, second), chain) in cases.items():
        apply(first, chain, tmp_path / f"{name} applied", version=1)
        assert diff(second, tmp_path / f"{name} applied").equal
        assert not diff(first, tmp_path / f"{name} applied").equal


def test_a_context_in_which_vllm_scales_no_attention_is_refused_by_name(checkpoints, tmp_path):
    cases = {LLAMA4: (checkpoints(LLAMA4), {"tp": 2})}
    for of in run_on_ranks(
        2, "refit_each", sides(tmp_path, 2, 2, True), cases, module="refit_without_table_on_cpu"
    ):
        assert "attn_temperature_tuning is True, but the served model's is False" in of[LLAMA4]


if install_sglang_cpu.installed():

    def test_an_sglang_serves_the_transposed_experts_of_gpt_oss(checkpoints, tmp_path):
        options = {"tp": 2, "disable_radix_cache": True, "attention_backend": "triton"}
        results = run_on_ranks(
            2,
            "refit_each",
            sides(tmp_path, 2, 2, True),
            {GPT_OSS: (checkpoints(GPT_OSS), options)},
            module="refit_without_table_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        for of in results:
            now, (before, expected), _ = of[GPT_OSS]
            assert {key for key in expected if now[key] != expected[key]} == set()
            assert sum(before[key] != expected[key] for key in expected) >= 0.5 * len(expected), (
                "other weights"
            )
