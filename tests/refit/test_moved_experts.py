"""Refits of a vLLM that copies experts and moves them by their load (EPLB)."""

from pathlib import Path

import pytest

from tests.megatron.test_logits import EP, ETP, TP, flags_at
from tests.starting.ranks import free_port, run_on_ranks

EP2 = dict(tp=2)


def run(function, converted, variant, parallel, trainers, folder, together=False, engine=EP2, **options):
    checkpoints = converted(variant)
    engines = engine["tp"] * engine.get("dp", 1)
    sides = {"trainer": trainers, "engine": engines, "together": together, "folder": str(folder), "port": free_port()}
    arguments = sides, flags_at(Path(checkpoints[0][1]), parallel), checkpoints, engine
    ranks = trainers if together else trainers + engines
    return run_on_ranks(ranks, function, *arguments, module="refit_moved_experts_on_cpu", options=options)[-engines:]


CASES = [
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, False, {"delta": True, "backend": "nccl"}),
    ("deepseek-v3", f"{EP} 2 {ETP} 1", 2, True, {"moved_before": True}),
]


@pytest.mark.parametrize("variant, parallel, trainers, together, options", CASES)
def test_each_copy_of_an_expert_is_written_where_vllm_has_moved_it(
    variant, parallel, trainers, together, options, converted, tmp_path
):
    for found, said in run("refits", converted, variant, parallel, trainers, tmp_path, together, **options):
        for wrong, _, _ in found:
            assert wrong == []
        assert [moved > 0 for _, moved, _ in found] == [False, True, True, False, False, True]
        assert "moves experts by their load (EPLB) while it serves" in said
