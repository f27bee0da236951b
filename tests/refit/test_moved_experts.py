"""Refits of a vLLM that copies experts and moves them by their load (EPLB): bit for bit what vLLM's own loader makes of
the export, moved by vLLM's own function to the same places."""

from pathlib import Path

import pytest

import reshard
from reshard.delta import save
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.refit.test_blocks_engine import published
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.refits import ENGINES

MODULES = {"vLLM": "refit_moved_experts_on_cpu", "SGLang": "refit_sglang_moved_experts_on_cpu"}
EXPERTS = "mlp.experts.routed_experts."


def run(
    function, checkpoints, parallel, trainers, folder, together=False, engine=None, into="vLLM", **options
):
    """What the ranks of an engine return that has all experts and copies on two ranks."""
    engine = engine or {"tp": 2}
    engines = engine["tp"] * engine.get("dp", 1)
    sides = {
        "trainer": trainers,
        "engine": engines,
        "together": together,
        "folder": str(folder),
        "port": free_port(),
    }
    arguments = sides, flags_at(Path(checkpoints[0][1]), parallel), checkpoints, engine
    ranks = trainers if together else trainers + engines
    how = {"python": ENGINES[into].python(), "environment": ENGINES[into].environment(), "options": options}
    return run_on_ranks(ranks, function, *arguments, module=MODULES[into], **how)[-engines:]


CASES = [
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, False, {"delta": True, "backend": "nccl"}),
    ("qwen3-moe", f"{PP} 2", 2, False, {"engine": {"tp": 1, "dp": 2}, "relays": "always"}),
    ("deepseek-v3", f"{EP} 2 {ETP} 1", 2, True, {"moved_before": True}),
    ("qwen3-moe", f"{EP} 2 {ETP} 1", 2, True, {"engine": {"tp": 2, "moe_backend": "flashinfer_cutlass"}}),
]


@pytest.mark.parametrize("variant, parallel, trainers, together, options", CASES)
def test_each_copy_of_an_expert_is_written_where_vllm_has_moved_it(
    variant, parallel, trainers, together, options, converted, tmp_path
):
    """Over a connection that was made before. Also after a refit that failed, and with deltas between moves."""
    checkpoints = converted(variant)
    digests = [reshard.digest(hf, dtype="bfloat16").text for hf, _ in checkpoints]
    for found, (control, mended), said in run(
        "refits", checkpoints, parallel, trainers, tmp_path, together, **options
    ):
        assert [moved for moved, _, _ in found] == [False, True, True, False, True]
        assert all(wrong == [] for _, wrong, _ in found), found
        assert [report["digest"] for *_, report in found] == [digests[which] for which in (0, 1, 1, 0, 1)]
        assert control and all(EXPERTS in name for name in control), "the places of before are others"
        assert mended == []
        read, adapter, refusal = said
        assert "moves experts by their load (EPLB) while it serves" in read
        assert "a refit of an adapter does not follow them" in adapter
        assert "experts where they were at start" in refusal
        if options.get("delta"):
            sent = [report["is_delta"] for *_, report in found]
            assert sent == [False, False, False, True, False]
            assert "engines hold other boxes than before" in found[2][-1]["delta_reason"]


def test_what_vllm_copies_in_the_background_is_not_taken_over_by_a_refit(converted, tmp_path):
    """A layer that it has copied stays where it is, and layers after it move, with the new weights."""
    for found, mended, counted in run("while_moving", converted("qwen3-moe"), "", 1, tmp_path):
        (first, layers), (second, rest), (control, _) = found
        assert first == second == mended == [] and layers - 2 == rest > 0
        assert control and all(EXPERTS in name for name in control), "what it had copied are other weights"
        idle, begun, ended, said = counted
        assert (idle, begun) == (0, 1) and ended > 1 and "has moved experts by their load (EPLB)" in said


@pytest.mark.parametrize("how", ["digest", "describe", "failed", "begun"])
def test_a_refit_follows_experts_though_somebody_has_looked_between(how, converted, tmp_path):
    options = {"delta": True, "backend": "nccl"} if how == "begun" else {}
    for said, wrong in run("looked_between", converted("qwen3-moe"), "", 1, tmp_path, how=how, **options):
        assert said == ["no error", "no error"] and wrong == []


def test_a_refit_that_plans_anew_ignores_what_connect_ignored(converted, tmp_path):
    for said, wrong in run("ignoring", converted("qwen3-moe"), "", 1, tmp_path):
        assert said == ["no error", "no error"] and wrong == []


def test_memory_that_was_unmapped_is_mapped_again_before_the_copies_of_a_new_plan(converted, tmp_path):
    for kept, anew in run("calls", converted("qwen3-moe"), "", 1, tmp_path):
        for told in (kept, anew):  # the first is the control
            before = told[: told.index("run")]
            since = before[len(before) - before[::-1].index("release") :] if "release" in before else before
            assert {"prepare", "update_addresses"} & {*since}, told


@pytest.mark.parametrize("redundant", [0, 4], ids=["each expert once", "copies"])
def test_newcomers_get_experts_from_where_vllm_has_moved_them_and_nothing_while_it_moves_them(
    redundant, converted, tmp_path
):
    given = converted("qwen3-moe"), f"{EP} 2 {ETP} 1", 2, tmp_path, True, {"tp": 2, "redundant": redundant}
    for found, ((ended, one), (counted, other)), (unseen, wrong) in run("lends", *given):
        dummy, *of_newcomers = found
        assert dummy and of_newcomers == ["no error", [], 3] * 2
        assert "that hands on its weights is about to get others or to move them" in ended and not one
        assert "has moved experts by their load (EPLB) since it was to hand them on" in counted and not other
        assert wrong and all(EXPERTS in name for name in wrong), "the control: where nobody looks"
        # Of copies some have moved and others have not.
        assert "replicas of it differ" in unseen if redundant else unseen == "no error"


def test_data_parallel_vllms_that_move_experts_in_the_background_are_refused(converted, tmp_path):
    engine = {"tp": 1, "dp": 2, "use_async": True}
    for said in run("refused", converted("qwen3-moe"), "", 0, tmp_path, engine=engine):
        assert "data parallel engines move experts in the background (EPLB)" in said
        assert "--eplb-config '{\"use_async\": false}'" in said


def test_experts_in_fp8_blocks_that_vllm_moves_are_refused_by_name(converted, tmp_path):
    checkpoints = converted("served-moe-blocks")[:1]
    _, overrides = published(checkpoints, tmp_path)
    for said in run("refused", checkpoints, "", 0, tmp_path, engine={"tp": 2, **overrides}):
        assert said.endswith("does not support: serve it in bf16, or without enable_eplb")


def test_experts_that_are_shuffled_for_a_kernel_and_moved_are_refused_by_name(converted, tmp_path):
    engine = {"tp": 2, "moe_backend": "flashinfer_trtllm"}
    for said in run("refused", converted("served-moe-halves"), "", 0, tmp_path, engine=engine):
        assert (
            "is rearranged for FLASHINFER_TRTLLM after loading, which a refit of experts that vLLM moves"
            in said
        )
        assert said.endswith("does not support: start vLLM with moe_backend='triton', or without enable_eplb")


def test_a_delta_of_a_chain_is_written_where_experts_are_and_not_where_they_were(converted, tmp_path):
    checkpoints = converted("qwen3-moe")
    chain = str(tmp_path / "chain")
    save(checkpoints[0][0], checkpoints[1][0], chain)
    for found, (written, rolled_back), is_ready in run("by_chain", checkpoints, "", 0, tmp_path, chain=chain):
        assert found == [[]] * 5 and is_ready
        assert "others have written or moved weights of this vLLM since they were compared" in written
        assert "others have written, moved or discarded weights since" in rolled_back


SGLANG = {"tp": 2, "ep": 2, "ep_num_redundant_experts": 2}
SGLANG_CASES = [
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, False, {"backend": "nccl"}),
    ("deepseek-v3", f"{EP} 2 {ETP} 1", 2, True, {}),
]


@pytest.mark.parametrize("variant, parallel, trainers, together, options", SGLANG_CASES)
def test_each_copy_of_an_expert_is_written_where_sglang_has_moved_it(
    variant, parallel, trainers, together, options, converted, tmp_path
):
    given = converted(variant), parallel, trainers, tmp_path, together, SGLANG, "SGLang"
    for found, said in run("refits", *given, **options):
        assert [moved for moved, _ in found] == [False, True, True, False, True]
        *wrong, control = [names for _, names in found]
        assert wrong == [[]] * 4
        assert control and all(".experts." in name for name in control), "the places of before are others"
        assert "moves experts by their load (EPLB) while it serves" in said


def test_experts_are_written_where_sglang_was_told_to_put_them(converted, tmp_path):
    given = converted("qwen3-moe"), "", 1, tmp_path, False, SGLANG, "SGLang"
    for wrong, experts, said in run("anywhere", *given):
        assert wrong == [] and said == "no error"
        assert experts[:2] == [(6, 1, 0, 5, 7, 2, 3, 4, 5, 0), (*range(8), 3, 1)]
