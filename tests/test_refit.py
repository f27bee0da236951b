"""Refits between real Megatron models and vLLM's real model classes: bit for bit what vLLM's own loader makes of the export."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from reshard import Layout, VllmLayout, hf_to_mcore, plan_refit, read_model
from reshard.refit.members import PROTOCOL
from tests.disk import ended
from tests.ranks import free_port, run_on_ranks
from tests.test_logits import EP, ETP, PP, TP, VPP, flags_at

# variant, Megatron's layout on how many ranks, vLLM's on how many, in the same processes
LAYOUTS = [
    ("llama", f"{TP} 2 {PP} 2", 4, dict(tp=4), 4, True),
    ("llama-rope-tied", f"{PP} 2 {VPP} 2", 2, dict(pp=2), 2, True),
    ("llama-bias", f"{PP} 4 --decoder-first-pipeline-num-layers 1", 4, dict(tp=2), 2, False),
    ("qwen2", f"{TP} 2", 2, dict(tp=8), 8, False),  # four times the key heads
    ("qwen2-tied", f"{TP} 2 {PP} 2", 4, dict(tp=2, pp=2), 4, True),
    ("qwen3", f"{TP} 8", 8, dict(tp=2), 2, False),  # four times the query groups
    (
        "qwen3-tied",
        f"{PP} 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        3,
        dict(tp=1),
        1,
        False,
    ),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=4), 4, True),
    ("qwen3-moe", f"{TP} 4 {EP} 2 {ETP} 2", 4, dict(tp=4, enable_expert_parallel=True), 4, True),
    ("qwen3-moe", f"{EP} 4 {ETP} 1", 4, dict(tp=8, enable_expert_parallel=True), 8, False),
    ("qwen3-moe-mixed", f"{TP} 2 {PP} 2 {VPP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True),
    ("qwen3-moe-step", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2), 2, False),
    ("deepseek-v3", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=4), 4, True),
    ("deepseek-v3", f"{TP} 4 {EP} 2 {ETP} 2", 4, dict(tp=2, enable_expert_parallel=True), 2, False),
    ("deepseek-v3-no-q-lora", f"{TP} 2 {EP} 4 {ETP} 1", 4, dict(tp=2), 2, False),
    ("glm4-moe", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True),
    ("glm4-moe-air", f"{TP} 2 {EP} 2 {ETP} 2", 4, dict(tp=2, enable_expert_parallel=True), 2, False),
    ("qwen3", f"{TP} 2", 2, dict(tp=1, dp=2), 2, True),
    ("llama", f"{TP} 2", 2, dict(tp=2, dp=2), 4, False),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, dp=2), 4, True),
    ("qwen3-moe", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, dp=2, enable_expert_parallel=True), 4, True),
    ("deepseek-v3", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, dp=2, enable_expert_parallel=True), 4, True),
    (
        "deepseek-v3",
        f"{TP} 2 {EP} 2 {ETP} 1",
        4,
        dict(tp=4, enable_expert_parallel=True, expert_placement_strategy="round_robin"),
        4,
        True,
    ),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Two checkpoints of a variant in bf16, each as (Hugging Face directory, Megatron directory)."""
    from tests.checkpoints import make

    made = {}

    def get(variant: str, **options) -> list[tuple[str, str]]:
        key = (variant, *sorted(options))
        if key not in made:
            made[key] = []
            for seed in (0, 1):
                folder = tmp_path_factory.mktemp(variant)
                make(folder / "hf", variant, torch.bfloat16, seed=seed, **options)
                hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
                made[key].append((str(folder / "hf"), str(folder / "mcore")))
        return made[key]

    return get


# What vLLM keeps beside packed codes, which no weights change.
ALIKE = ("_shape", "_zero_point", "g_idx", "_sort_indices")


def refit(
    checkpoints,
    parallel: str,
    trainers: int,
    engine: dict,
    engines: int,
    together: bool,
    folder,
    sides: dict | None = None,
    **options,
):
    """Run it, and check what every engine rank holds after each refit; the reports."""
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
        module="refit_on_cpu",
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
            assert {
                name for name in loaded if now.get(name) != loaded[name]
            } == set() and now.keys() == loaded.keys()
        # The second refit must have brought other weights: nearly all of them differ between the checkpoints.
        assert sum(held[0][name] != held[1][name] for name in held[0]) > 0.6 * len(
            [n for n in held[0] if not n.endswith(ALIKE) and "scale" not in n and "cache" not in n]
        )
    assert checked == engines
    if not options.keys() & {"traced", "executor"}:
        as_forecast(
            checkpoints[0][0],
            parallel,
            trainers,
            engine,
            together,
            [reports for held, _, _, reports, _ in results if held[0]],
            "published" in options and engine["hf_overrides"]["quantization_config"]["quant_method"] == "fp8",
        )
    return [reports for _, _, _, reports, _ in results]


SIZES = {TP: "tp", PP: "pp", VPP: "vpp", EP: "ep", ETP: "etp", "--decoder-first-pipeline-num-layers": "first_stage_layers",
         "--decoder-last-pipeline-num-layers": "last_stage_layers"}  # fmt: skip


def as_forecast(
    checkpoint: str, parallel: str, trainers: int, engine: dict, together: bool, reports: list, encoded: bool
) -> None:
    """A refit on simulated ranks must have moved just these bytes; of what travels `encoded` in fp8 about half."""
    words = parallel.split()
    sizes = {SIZES[flag]: int(n) for flag, n in zip(words[::2], words[1::2], strict=True)}
    model = read_model(checkpoint)
    layout = Layout(**sizes)
    target = VllmLayout(engine.get("tp", 1), engine.get("pp", 1), engine.get("dp", 1), engine.get("enable_expert_parallel", False),
                        engine.get("expert_placement_strategy") == "round_robin")  # fmt: skip
    dp = trainers // (layout.tp * layout.pp)
    found = plan_refit(
        model,
        layout,
        target,
        dp=dp,
        colocated=together,
        gpus_per_host=64,
        vocab_divisible_by=8,
        transformer_impl="local",
    )
    assert [r["local_bytes"] for _, r in reports] == [r.local_bytes for r in found.ranks]
    for (_, report), rank in zip(reports, found.ranks, strict=True):
        came = report["bucket_bytes"] + report["peer_bytes"]  # one of them: the second on a GPU
        if encoded and rank.host_bytes:
            # embedding, output and norms are as they were
            assert 0.5 < came / rank.host_bytes < 0.7
        elif engine.get("quantization") == "fp8_per_block":
            # the padding of blocks travels too
            assert (came > 0) == (rank.host_bytes > 0)
        else:
            assert came == rank.host_bytes


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together"), LAYOUTS,
                         ids=lambda v: str(v).replace("-model-parallel-size", "").replace(" ", ""))  # fmt: skip
def test_a_refit_leaves_what_vllms_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, engines, together, converted, tmp_path
):
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path)


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_mtp_layers_and_their_embedding_stay_behind(variant, converted, tmp_path):
    refit(converted(variant, mtp=True), f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2), 2, False, tmp_path)


def test_small_buckets_give_the_same(converted, tmp_path):
    reports = refit(
        converted("qwen3-moe"), f"{TP} 2", 2, dict(tp=2), 2, False, tmp_path, bucket_bytes=4 * 2 * (64 << 10)
    )
    assert all(r["bucket_bytes"] > 4 * (64 << 10) for r in reports[-1])


def test_what_cannot_be_mapped_is_staged_on_the_same_host(converted, tmp_path):
    # Two readers and two slots of 64 KiB: many rounds, and every rank packs and unpacks.
    together = refit(
        converted("qwen3-moe"),
        f"{TP} 2 {EP} 2 {ETP} 1",
        2,
        dict(tp=2),
        2,
        True,
        tmp_path,
        executor="staged",
        bucket_bytes=4 << 16,
    )
    apart = refit(
        converted("qwen3-moe"),
        f"{PP} 2 {EP} 2 {ETP} 1",
        4,
        dict(tp=2),
        2,
        False,
        tmp_path / "apart",
        executor="staged",
        moving=True,
    )
    for reports in (*together, *apart[-2:]):
        assert all(r["staged_bytes"] > 1e5 and r["bucket_bytes"] == r["peer_bytes"] == 0 for r in reports)


def test_what_is_staged_is_what_the_trainer_has_now_also_where_its_memory_moves_under_mappings_that_stay(
    converted, tmp_path
):
    # Nothing is compared by digests, so that old bytes would pass for new ones.
    refit(
        converted("qwen3"),
        "",
        1,
        dict(tp=1),
        1,
        False,
        tmp_path,
        executor="staged",
        moving=True,
        release=False,
        verify=False,
    )


def test_a_member_with_neither_side_looks_on(converted, tmp_path):
    checkpoints = converted("qwen3")
    sides = {"trainer": 1, "engine": 1, "idle": 1, "folder": str(tmp_path), "port": free_port()}
    arguments = (sides, flags_at(Path(checkpoints[0][1]), ""), checkpoints, {})
    results = run_on_ranks(3, "refit_twice", *arguments, module="refit_on_cpu")
    assert [version for *_, version in results] == [11, 11, 11]
    held, expected, *_ = results[1]
    assert held == expected and results[2][0] == [None, None]


def test_bytes_of_the_same_process_are_not_sent(converted, tmp_path):
    reports = refit(converted("qwen3"), f"{TP} 2", 2, dict(tp=2), 2, True, tmp_path)
    for one, two in reports:
        # MLP and attention shards are where they are needed; the vocabulary is padded in another way on either side.
        assert one["local_bytes"] > 5 * one["bucket_bytes"] and one["local_bytes"] == two["local_bytes"]


def test_parameters_that_move_between_refits_are_found_again(converted, tmp_path):
    refit(converted("deepseek-v3"), f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, True, tmp_path, moving=True)


@pytest.mark.parametrize(
    ("variant", "parallel"), [("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1"), ("llama-rope-tied", f"{PP} 2 {VPP} 2")]
)
def test_parameters_in_a_distributed_optimizers_buffer_and_frozen_ones_are_refitted_alike(
    variant, parallel, converted, tmp_path
):
    refit(converted(variant), parallel, 4, dict(tp=2), 2, False, tmp_path, ddp=True)


def test_what_had_moved_before_a_refit_that_failed_is_found_by_the_next(converted, tmp_path):
    checkpoints = converted("qwen3")
    sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
    flags = flags_at(Path(checkpoints[0][1]), f"{TP} 2")
    for said, wrong in run_on_ranks(
        2, "moved_before_a_failure", sides, flags, checkpoints, dict(tp=2), module="refit_on_cpu"
    ):
        assert "give all the same" in said and wrong == []


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_a_family_without_vllm_names_goes_by_the_traced_layout(variant, converted, tmp_path):
    refit(converted(variant), f"{PP} 2", 2, dict(tp=2), 2, False, tmp_path, traced=True)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("qwen3-moe", "nothing"),
        ("deepseek-v3", "nothing"),
        ("glm4-moe", "nothing"),
        ("qwen3-moe", "kind"),
        ("qwen3-moe", "loader"),
    ],
)
def test_layers_that_are_alike_are_traced_by_one_of_them(variant, change, checkpoint):
    engine = dict(tp=2, enable_expert_parallel=True)
    for found in run_on_ranks(2, "traces", str(checkpoint(variant)), change, engine, module="traces_on_cpu"):
        assert found["same"] and found["layers"] > 1
        if change == "loader":  # which only its copies tell
            assert len(found["shown"]) == 2 and found["shown"][1] == found["of"] and found["places"] != {0}
        else:
            [shown] = found["shown"]
            assert shown < found["of"]


@pytest.fixture
def hosts():
    """Two hosts: network namespaces with a link between them."""
    program = [sys.executable, str(Path(__file__).parent / "two_hosts.py")]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with ended(subprocess.Popen(program, text=True, **pipes)) as process:
        assert process.stdin and process.stdout and process.stderr
        said = process.stdout.readline()
        if not said:
            problem = process.stderr.read()
            assert "PermissionError" in problem, problem
            pytest.skip("this machine lets nobody make network namespaces")
        yield json.loads(said)
        process.stdin.close()
        process.wait(60)


def test_a_trainer_and_an_engine_on_two_hosts(converted, tmp_path, hosts):
    reports = refit(
        converted("qwen3-moe"), f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, False, tmp_path, {"hosts": hosts}
    )
    assert all(r["bucket_bytes"] > 0 and r["local_bytes"] == r["peer_bytes"] == 0 for r in reports[-1])


def test_a_host_that_cannot_be_reached_is_named(tmp_path, hosts):
    lost = hosts | {"hosts": hosts["hosts"][::-1]}  # rank 0 would serve at an address of the other host
    sides = {
        "trainer": 1,
        "engine": 1,
        "folder": str(tmp_path),
        "port": free_port(),
        "timeout": 5,
        "hosts": lost,
    }
    results = run_on_ranks(2, "joining", sides, module="refit_on_cpu")
    assert (
        "rank 0 cannot serve at 10.199.7.1" in results[0]
        and "rank 1 found no member 0 at 10.199.7.1" in results[1]
    ), results


def fault(converted, folder, what: str, variant: str = "qwen3", timeout: float = 60, flags: str = ""):
    checkpoint = converted(variant)[0]
    sides = {"trainer": 1, "engine": 2, "folder": str(folder), "port": free_port(), "timeout": timeout}
    return run_on_ranks(
        3,
        "fault",
        sides,
        flags_at(Path(checkpoint[1]), flags),
        checkpoint,
        what,
        module="refit_on_cpu",
        may_die=what in ("stalls", "trainer dies"),
    )


@pytest.mark.parametrize(("what", "flags", "sentence"), [
    ("config", "", "the trainer's layernorm_epsilon is 1e-06, but the served model's is 0.5"),
    ("another trainer", "--rotary-base 50000", "the trainer's rotary_base is 50000, but the served model's is 10000"),
    ("dtype", "", "is bfloat16 in the trainer, but float16 in the engine"),
    ("protocol", "", f"has protocol {PROTOCOL}, inference rank 2 has 99"),
    ("lacks a parameter", "", "the trainer's model lacks 1 parameters that the config of inference rank 1 calls for: model.layers.0.self_attn.o_proj.weight"),
    ("lies elsewhere", "", "is on meta, and a refit reads from cpu: move the whole model there first"),
    ("has one too many", "", "holds 1 parameters that qwen3 does not have: decoder.layers.adapter.weight"),
])  # fmt: skip
def test_two_sides_that_do_not_fit_are_refused_at_connect_everywhere(
    what, flags, sentence, converted, tmp_path
):
    for said in fault(converted, tmp_path, what, flags=flags):
        assert sentence in said[0] or (what == "protocol" and "has protocol 99, " in said[0]), said


def test_a_member_that_never_comes_is_named_within_the_time_limit(converted, tmp_path):
    for said in fault(converted, tmp_path, "never comes", timeout=5)[:2]:
        assert "rank 2 did not reach 'hello' within 5 s" in said[0]


@pytest.mark.parametrize(
    ("what", "who"),
    [("stalls", "inference rank 2"), ("trainer dies", "trainer rank 0")],
)
def test_a_member_that_stalls_or_takes_the_store_with_it_is_named_within_the_time_limit(
    what, who, converted, tmp_path
):
    results = fault(converted, tmp_path, what, timeout=5)
    for rank, said in enumerate(results):
        if who.endswith(str(rank)):
            continue
        sentences = f"{who} is silent", f"{who} did not come to refit 2 within 5 s", f"{who}, which serves"
        assert said[0] == "no error" and any(sentence in said[1] for sentence in sentences), said
        # Nothing is written before all have come: an engine's rank serves what it has.
        assert said[2] is (True if rank else None), said


@pytest.mark.parametrize(("what", "sentence"), [
    ("fails in the middle", "inference rank 1: the device is gone"),
    ("loses a tile", "tensors did not arrive as they are in the trainer: "),
])  # fmt: skip
def test_an_engine_serves_no_half_written_model_until_a_whole_refit_succeeded(
    what, sentence, converted, tmp_path
):
    trainer, first, second = fault(converted, tmp_path, what)
    for said in (trainer, second):
        assert said[0] == "no error" and sentence in said[1], said
    for said in (first, second):
        assert "holds a half-written model" in said[2] and said[3:] == ["(False, 1)", "(True, 3)"], said


def test_offloaded_parameters_are_refused_before_a_byte_moves_and_refitted_when_they_are_back(
    converted, tmp_path
):
    for rank, said in enumerate(fault(converted, tmp_path, "is offloaded")):
        assert said[0] == said[2] == "no error" and "output_layer.weight has no memory" in said[1], said
        assert said[3] is (True if rank else None), said


@pytest.mark.parametrize(("variant", "change", "sentence"), [
    ("qwen3", "gate and up", "disagree on model.layers.0.mlp.gate_up_proj.weight"),
    ("qwen3-moe", "expert", "disagree on model.layers.0.mlp.experts.routed_experts.w13_weight"),
    ("qwen3-moe", "backend", "keeps its experts in the order of FLASHINFER_CUTLASS"),
    ("qwen3-moe", "nothing", "no error"),
    ("qwen3", "fp8", "model.layers.0.self_attn.qkv_proj serves from weights that Fp8LinearMethod has changed"),
])  # fmt: skip
def test_a_disagreement_with_vllms_own_loader_is_refused_and_changes_nothing(
    variant, change, sentence, converted, tmp_path
):
    sides = {"trainer": 1, "folder": str(tmp_path), "port": free_port()}
    [(said, unchanged)] = run_on_ranks(
        1, "agreement", sides, converted(variant)[0][0], {}, change, module="refit_on_cpu"
    )
    assert sentence in said and unchanged


# Moments of a connect and of a refit, and whose rank dies then.
DEATHS = {
    "connect posts held": "trainer",
    "connect posts pieces": "engine",
    "connect ends": "engine",
    "refit comes": "trainer",
    "refit between": "trainer",
    "refit copies": "engine",
    "refit posts digests": "trainer",
    "refit ends": "trainer",
    "refit over": "engine",
}
RANKS = int(os.environ.get("RESHARD_TEST_RANKS", "2"))  # on either side
PATIENCE = 4 * RANKS  # seconds that one waits for another


@pytest.fixture(scope="module")
def deaths(converted, tmp_path_factory):
    """By the moment of a member's death, who it was, and what all say: so many ranks of a trainer (PP2), and of an engine (TP)."""
    checkpoint = converted("qwen3")[0]
    flags = flags_at(Path(checkpoint[1]), f"{PP} 2 {TP} {RANKS // 2}")

    def run(moment: str):
        victim = {"trainer": 1, "engine": 2 * RANKS - 1}[DEATHS[moment]]
        sides = {
            "trainer": RANKS,
            "engine": RANKS,
            "folder": str(tmp_path_factory.mktemp("death")),
            "port": free_port(),
            "timeout": PATIENCE,
        }
        arguments = sides, flags, checkpoint, {"tp": RANKS}, victim, moment
        return victim, run_on_ranks(2 * RANKS, "death", *arguments, module="refit_on_cpu", may_die=True)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(DEATHS, pool.map(run, DEATHS), strict=True))


@pytest.mark.parametrize("moment", DEATHS)
def test_a_member_that_is_killed_in_the_middle_is_named_in_time_and_nothing_torn_is_served(moment, deaths):
    victim, results = deaths[moment]
    assert results[victim] is None, "it has died"
    for said, seconds, state in (results[rank] for rank in range(2 * RANKS) if rank != victim):
        if moment == "refit over":
            assert said == "no error" and state in (None, (True, 2)), (said, state)
            continue
        assert blamed(said) == {victim}, said
        assert seconds < 3 * PATIENCE
        assert state in (None, (moment == "refit comes", 1 if moment.startswith("refit") else None)), state


def blamed(sentence: str) -> set[int]:
    """The ranks that a sentence says are dead; before a colon is who says it."""
    found = re.search(r"(?:: |^|; )([^:;]*?) (?:is silent|did not)", sentence)
    return {int(rank) for rank in re.findall(r"rank (\d)", found[1])} if found else set()


LIMIT = 4  # seconds that one waits for the other


@pytest.fixture(scope="module")
def lateness(converted, tmp_path_factory):
    """What a trainer and an engine say where one of them is late by more than the time limit."""
    checkpoints, folder = converted("qwen3"), tmp_path_factory.mktemp("lateness")
    # Over IPv6, as an address in brackets.
    sides = {
        "trainer": 1,
        "engine": 1,
        "folder": str(folder),
        "port": free_port(),
        "timeout": LIMIT,
        "host": "[::1]",
    }
    return run_on_ranks(
        2, "lateness", sides, flags_at(Path(checkpoints[0][1]), ""), checkpoints, module="refit_on_cpu"
    )


@pytest.mark.parametrize(("step", "trainer", "engine", "state"), [
    # A connection that one has given up is nobody's: who comes later is told at once, and both may connect again.
    ("engine late at connect", "rank 1 did not reach 'hello' within 4 s", "rank 0: ", (False, None, None)),
    ("trainer late at connect", "rank 1: ", "rank 0 did not reach 'hello' within 4 s", (False, None, None)),
    ("both connect", "no error", "no error", (False, None, None)),
    ("both refit", "no error", "no error", (True, 5, 0)),
    # Before the first byte: the engine serves what it had.
    ("engine late at a refit", "inference rank 1 did not come to refit 2 within 4 s", "trainer rank 0: ", (True, 5, 0)),
    ("trainer late at a refit", "inference rank 1: ", "trainer rank 0 did not come to refit 3 within 4 s", (True, 5, 0)),
    ("they disagree", "version 41", "version 8", (True, 5, 0)),
    ("only one says", "no error", "no error", (True, 42, 1)),
    ("none says", "no error", "no error", (True, 43, 1)),
    # After it: the engine holds what nobody vouches for, and does not serve it, though every byte may have come.
    ("engine late in the middle", "inference rank 1 ", "trainer rank 0: ", (False, 43, None)),
    ("after engine was late in the middle", "no error", "no error", (True, 51, 0)),
    ("trainer late in the middle", "inference rank 1: ", "trainer rank 0 did not", (False, 51, None)),
    ("after trainer was late in the middle", "no error", "no error", (True, 51, 0)),
    ("engine late once more", "inference rank 1 ", "trainer rank 0: ", (False, 51, None)),
    ("they want other ways", "asks for executor='staged', inference rank 1 for 'buckets'", "give all the same", (False, 51, None)),
    ("connect anew", "no error", "no error", (False, 51, None)),
    ("refit anew", "no error", "no error", (True, 61, 0)),
    ("both sides moved", "no error", "no error", (True, 62, 1)),
    ("the engine has another parameter", "inference rank 1: vLLM's", "has been replaced by one of another shape", (True, 62, None)),
    ("and has it back", "no error", "no error", (True, 63, 1)),
])  # fmt: skip
def test_a_member_that_is_late_in_any_phase_takes_no_torn_model_for_a_good_one(
    step, trainer, engine, state, lateness
):
    (says, _, _), (hears, seconds, now) = (side[step] for side in lateness)
    assert trainer in says and engine in hears, (says, hears)
    assert now[:2] == state[:2] and (state[2] is None or now[2] == state[2]), now
    if "late at" in step:
        # Within the limit and little more; and who comes late is told at once.
        waited, came_late = (seconds, lateness[0][step][1])[:: -1 if step.startswith("engine") else 1]
        assert LIMIT <= waited < 5 * LIMIT and came_late < LIMIT, (waited, came_late)
