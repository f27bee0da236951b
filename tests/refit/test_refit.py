"""Refits between real Megatron models and vLLM's real model classes: bit for bit what vLLM's own
loader makes of the export."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import with_config
from tests.tools.disk import ended
from tests.tools.refits import refit

# variant, Megatron's layout on how many ranks, vLLM's on how many, in the same processes, and options. Each
# family comes at least once, each axis of either layout too; that the plans of all other layouts are right is
# shown without processes (test_plan.py, test_planner.py).
MOVING, DDP = {"moving": True}, {"ddp": True}
LAYOUTS = [
    ("mistral", f"{TP} 2 {PP} 2", 4, dict(tp=4), 4, True, {}),
    ("llama-rope-tied", f"{PP} 2 {VPP} 2", 4, dict(tp=2), 2, False, DDP),
    ("llama-bias", f"{PP} 2 --decoder-first-pipeline-num-layers 1", 2, dict(tp=2), 2, True, {}),
    ("qwen2", f"{TP} 2", 2, dict(tp=4), 4, False, {}),  # twice the key heads
    ("qwen2-tied", f"{TP} 2 {PP} 2", 4, dict(tp=2, pp=2), 4, True, {}),
    ("qwen3", f"{TP} 4", 4, dict(tp=2), 2, False, {}),  # twice the query groups
    (
        "qwen3-tied",
        f"{PP} 3 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
        3,
        dict(tp=1),
        1,
        False,
        {},
    ),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2), 2, False, DDP),
    ("qwen3-moe", f"{TP} 4 {EP} 2 {ETP} 2", 4, dict(tp=4, enable_expert_parallel=True), 4, True, {}),
    ("qwen3-moe-mixed", f"{TP} 2 {PP} 2 {VPP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True, {}),
    ("deepseek-v3", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=4), 4, True, MOVING),
    ("deepseek-v3-no-q-lora", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, True, {}),
    ("glm4-moe", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True, {}),
    ("glm4-moe-air", f"{TP} 2 {EP} 2 {ETP} 2", 4, dict(tp=2, enable_expert_parallel=True), 2, False, {}),
    ("mixtral", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, enable_expert_parallel=True), 2, True, {}),
    ("seed-oss", f"{TP} 2", 4, dict(tp=4), 4, True, {}),  # twice the key heads
    ("phi4", f"{TP} 2 {PP} 2", 4, dict(tp=4), 4, True, {}),
    ("ling", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=4), 4, True, {}),  # twice the key heads
    ("ling-bias", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2, enable_expert_parallel=True), 4, False, {}),
    ("qwen2-moe-mixed", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True, {}),
    # twice the query groups, and the key heads
    ("minimax-m2", f"{TP} 4 {EP} 2 {ETP} 2", 4, dict(tp=4), 4, True, {}),
    ("olmoe", f"{TP} 4 {EP} 2 {ETP} 2", 4, dict(tp=4), 4, True, {}),
    ("ernie", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=4), 4, True, {}),  # twice the key heads
    ("gpt-oss", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True, {}),
    ("gpt-oss", f"{EP} 2 {ETP} 1", 2, dict(tp=2, enable_expert_parallel=True), 2, True, {}),
    ("glm4-moe-lite", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, True, {}),
    ("deepseek-v32", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2), 2, False, {}),
    ("glm-moe-dsa-shared", f"{EP} 2 {ETP} 1", 2, dict(tp=2, enable_expert_parallel=True), 2, True, {}),
    ("qwen3-next", f"{TP} 2", 2, dict(tp=2), 2, True, MOVING),
    ("qwen3-next", f"{EP} 2 {ETP} 1", 2, dict(tp=2, enable_expert_parallel=True), 2, True, {}),
    ("qwen3", f"{TP} 2", 2, dict(tp=1, dp=2), 2, False, {"relays": "always"}),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, dp=2), 4, True, {}),
    ("qwen3-moe", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, dp=2, enable_expert_parallel=True), 4, True, {}),
    (
        "qwen3-moe",
        f"{PP} 2 {EP} 2 {ETP} 1",
        4,
        dict(tp=2, dp=2, enable_expert_parallel=True),
        4,
        False,
        {"relays": "always"},
    ),
    (
        "deepseek-v3",
        f"{TP} 2 {EP} 2 {ETP} 1",
        4,
        dict(tp=4, enable_expert_parallel=True, expert_placement_strategy="round_robin"),
        4,
        True,
        {},
    ),
]


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together", "options"), LAYOUTS,
                         ids=lambda v: str(v).replace("-model-parallel-size", "").replace(" ", ""))  # fmt: skip
def test_a_refit_leaves_what_vllms_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, engines, together, options, converted, tmp_path
):
    """Also of parameters that move between refits, and of those in a distributed optimizer's buffer beside
    frozen ones."""
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path, **options)


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_mtp_layers_and_their_embedding_stay_behind(variant, converted, tmp_path):
    refit(converted(variant, mtp=True), f"{PP} 2", 2, dict(tp=2), 2, True, tmp_path)


@pytest.mark.parametrize("variant, engine", [
    ("qwen3", {"quantization": "fp8_per_tensor"}), ("llama-rope-tied", {}), ("qwen3-moe", {}), ("deepseek-v3", {}),
])  # fmt: skip
def test_layers_that_are_wrapped_for_adapters_are_refitted_where_they_are(
    variant, engine, converted, tmp_path
):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    checkpoint = converted(variant)[0]
    arguments = sides, flags_at(Path(checkpoint[1]), ""), checkpoint, engine
    results = run_on_ranks(1, "below_adapters", *arguments, module="refit_on_cpu")
    [(held, loaded, wrapped, same, (all_layers, without_absorbed), covered)] = results
    assert held == loaded and wrapped >= 16 and same
    assert without_absorbed == "no error" and covered, "each linear layer has its place in vLLM's buffers"
    absorbed = "kv_b_proj.weight and 3 more without its adapter, so that this would have no effect"
    assert absorbed in all_layers if variant == "deepseek-v3" else all_layers == "no error"


def test_small_buckets_give_the_same(converted, tmp_path):
    reports = refit(
        converted("qwen3-moe"), f"{TP} 2", 2, dict(tp=2), 2, False, tmp_path, bucket_bytes=4 * 2 * (64 << 10)
    )
    assert all(r["received_bytes_nccl"] > 4 * (64 << 10) for r in reports[-1])


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
        backend="staged",
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
        backend="staged",
        moving=True,
    )
    for reports in (*together, *apart[-2:]):
        for received in map(received_by, reports):
            assert received["staged"] > 1e5 and received["nccl"] == received["cuda_ipc"] == 0


@pytest.mark.parametrize("backend", ["staged", "nixl"])
def test_what_is_staged_is_what_the_trainer_has_now_also_where_its_memory_moves_under_mappings_that_stay(
    backend, converted, tmp_path
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
        backend=backend,
        moving=True,
        keep_mapped=True,
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


def received_by(report: dict) -> dict[str, int]:
    """The bytes that came by each route, of a report as a dict."""
    return {
        name.removeprefix("received_bytes_"): size
        for name, size in report.items()
        if name.startswith("received_bytes_")
    }


def test_bytes_of_the_same_process_are_not_sent(converted, tmp_path):
    reports = refit(converted("qwen3"), f"{TP} 2", 2, dict(tp=2), 2, True, tmp_path)
    for of_ranks in reports:
        first, second = map(received_by, of_ranks)
        # MLP and attention shards are where they are needed; the vocabulary is padded in another
        # way on either side.
        assert first["local"] > 5 * first["nccl"] and first["local"] == second["local"]


def test_what_had_moved_before_a_refit_that_failed_is_found_by_the_next(converted, tmp_path):
    checkpoints = converted("qwen3")
    sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
    flags = flags_at(Path(checkpoints[0][1]), f"{TP} 2")
    for said, wrong in run_on_ranks(
        2, "moved_before_a_failure", sides, flags, checkpoints, dict(tp=2), module="refit_on_cpu"
    ):
        assert "give all the same" in said and wrong == []


@pytest.mark.parametrize(
    "variant", ["deepseek-v3", "glm4-moe", "minimax-m2", "olmoe", "ling", "qwen3-next", "gpt-oss"]
)
def test_a_family_without_vllm_names_goes_by_the_traced_layout(variant, converted, tmp_path):
    refit(converted(variant), f"{PP} 2", 2, dict(tp=2), 2, True, tmp_path, traced=True)


def test_mtp_layers_stay_behind_that_vllm_could_not_load(converted, tmp_path):
    """Ling's, which are in the trainer and in the config alone."""
    pairs = [list(pair) for pair in converted("ling", mtp=True)]
    for n, pair in enumerate(pairs):
        pair[0] = str(with_config(Path(pair[0]), tmp_path / f"hf{n}"))
        file = Path(pair[0]) / "model.safetensors"
        tensors = {name: t for name, t in load_file(file).items() if not name.startswith("model.layers.4.")}
        save_file(tensors, file, metadata={"format": "pt"})
    refit(pairs, f"{PP} 2", 2, dict(tp=2), 2, True, tmp_path)


def test_a_ling_whose_whole_heads_vllm_would_turn_is_refused(converted, tmp_path):
    """Under transformers 5 vLLM finds the share of a head that turns in no config of Ling's, but its dims."""
    pairs = [list(pair) for pair in converted("ling")]
    for n, pair in enumerate(pairs):
        pair[0] = str(with_config(Path(pair[0]), tmp_path / f"hf{n}", rotary_dim=None))
    sentence = "the trainer's rotary_percent is 0.5, but the served model's is 1.0"
    with pytest.raises(AssertionError, match=sentence):
        refit(pairs, "", 1, {}, 1, True, tmp_path)


@pytest.mark.parametrize(
    ("variant", "engine"), [("qwen3-moe", {"enable_expert_parallel": True}), ("deepseek-v3", {})]
)
def test_a_family_whose_names_have_a_prefix_is_refitted_by_the_table(variant, engine, converted, tmp_path):
    options = {"tp": 2, **engine}
    refit(converted(variant), f"{PP} 2", 2, options, 2, True, tmp_path, nested=True)


# A variant; the rows that its table lacks; how vLLM serves it; a tensor that it has besides; and what nothing
# would be brought into.
FP8 = {"quantization": "fp8"}
UNBROUGHT = [
    ("qwen3", ["self_attn.q_norm"], {}, "", "model.layers.0.self_attn.q_norm.weight"),
    ("qwen3-moe", ["mlp.experts."], {}, "", "model.layers.0.mlp.experts.routed_experts.w13_weight"),
    ("qwen3-moe", ["mlp.experts."], FP8, "", "model.layers.0.mlp.experts.routed_experts.w13_weight"),
    ("deepseek-v3", ["mlp.gate.e_score"], {}, "", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("qwen3", [], {}, "extra", "model.norm.extra"),
    ("qwen3", [], {}, "k_scale", "model.norm.k_scale"),  # a scale where no attention is
    ("qwen3", [], {}, "table", "model.norm.table"),
    ("qwen3", [], {}, "", None),
    ("qwen3-moe", [], FP8, "", None),
]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("variant, rows, engine, extra, named", UNBROUGHT)
def test_an_engine_with_tensors_that_nothing_brings_is_refused_by_name(
    variant, rows, engine, extra, named, traced, converted, tmp_path
):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    directory = converted(variant)[0][0]
    arguments = sides, directory, rows, traced, engine, extra
    [(said, fit)] = run_on_ranks(1, "of_a_table_without", *arguments, module="refit_on_cpu")
    assert not fit
    if named is None:
        assert said == "no error"
    else:
        assert said.startswith("a refit would bring nothing into ") and named in said, said


def test_experts_that_vllm_moves_in_the_background_are_refused_without_its_worker(converted, tmp_path):
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    arguments = sides, converted("qwen3-moe")[0][0], [], False, {}, "eplb"
    [(said, _)] = run_on_ranks(1, "of_a_table_without", *arguments, module="refit_on_cpu")
    assert said.startswith(
        "vLLM moves experts in the background (EPLB), which a model without its worker does not show"
    )


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("qwen3-moe", "nothing"),
        ("deepseek-v3", "nothing"),
        ("glm4-moe", "nothing"),
        ("minimax-m2", "nothing"),
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
    program = [sys.executable, "-m", "tests.tools.hosts"]
    pipes: dict = dict(
        cwd=Path(__file__).parent.parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
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
        converted("qwen3-moe"), f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, False, tmp_path, {"hosts": hosts},
        backend="nccl", delta=True,
    )  # fmt: skip
    assert [report["is_delta"] for report in reports[-1]] == [False, True]
    for received in map(received_by, reports[-1]):
        assert received["nccl"] > 0 and received["local"] == received["cuda_ipc"] == received["nixl"] == 0


def test_two_hosts_with_a_trainer_and_an_engine_on_each_read_from_each_other_by_nixl(
    converted, tmp_path, hosts
):
    reports = refit(
        converted("qwen3-moe"), f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2), 2, True, tmp_path, {"hosts": hosts},
        bucket_bytes=4 << 16,
    )  # fmt: skip
    for of_ranks in reports:
        for received in map(received_by, of_ranks):
            assert received["local"] > 1e5 and received["nixl"] > 1e5
            assert received["cuda_ipc"] == received["staged"] == received["nccl"] == 0


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
    results = run_on_ranks(2, "joining", sides, module="refit_faults_on_cpu")
    assert (
        "rank 0 cannot serve at 10.199.7.1" in results[0]
        and "rank 1 found no member 0 at 10.199.7.1" in results[1]
    ), results
