"""Refits of SGLang's real model classes: bit for bit what SGLang's own loader makes of the export, by the
same tests as vLLM's (`tests.refits`)."""

from pathlib import Path

import pytest

from tests import install_sglang_cpu, warm
from tests.ranks import free_port, run_on_ranks
from tests.refits import refit
from tests.test_logits import EP, ETP, PP, TP, flags_at

# variant, Megatron's layout on how many ranks, SGLang's on how many, in the same processes
LAYOUTS = [
    ("llama", f"{TP} 2", 2, dict(tp=2), 2, True),
    ("llama-rope-tied", f"{PP} 2", 2, dict(tp=2), 2, False),
    ("qwen2", f"{TP} 2", 2, dict(tp=4), 4, False),  # twice the key heads
    ("qwen3", f"{TP} 2", 2, dict(tp=2, dp=2), 2, True),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, ep=2), 2, True),
    ("qwen3-moe", f"{EP} 2 {ETP} 1", 2, dict(tp=4, ep=2, dp=2), 4, False),
    ("mixtral", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, pp=2), 4, False),
    ("deepseek-v3", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, ep=2, dp=2), 2, True),
    ("deepseek-v3", f"{PP} 2", 2, dict(tp=2, pp=2), 4, False),
    ("glm4-moe", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2, ep=2), 4, True),
]


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together"), LAYOUTS,
                         ids=lambda v: str(v).replace("-model-parallel-size", "").replace(" ", ""))  # fmt: skip
def test_a_refit_leaves_what_sglangs_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, engines, together, converted, tmp_path
):
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path, into="SGLang")


def test_the_last_stage_of_a_tied_model_has_its_embedding_as_the_output(converted, tmp_path):
    refit(converted("qwen3-tied"), f"{PP} 2", 2, dict(pp=2), 2, True, tmp_path, into="SGLang", traced=True)


def on_a_rank(function: str, *arguments):
    """Call a function of `refit_sglang_on_cpu` in a process with SGLang's packages."""
    [result] = run_on_ranks(
        1, function, *arguments, module="refit_sglang_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    return result


REFUSALS = {
    "nothing": "no error",
    "biases of MLPs": "SGLang's LlamaForCausalLM does not take model.layers.0.mlp.gate_proj.bias",
    "a dense layer": "SGLang's Qwen3MoeForCausalLM does not take model.layers.1.mlp.gate_proj.weight",
    "runner": "is run by flashinfer_cutlass, which may keep experts in another order than loaded: start SGLang "
    "with --moe-runner-backend triton",
    "quantized": "serves from weights that SGLang's Fp8LinearMethod has changed",
    "shared experts": "start SGLang with --disable-shared-experts-fusion",
    "drafting": "drafts tokens by another model (--speculative-algorithm)",
    "weight cache": "(--weight-cache-mode), which a refit cannot write",
    "experts by load": "start it without --enable-eplb, --init-expert-location and --ep-num-redundant-experts",
    "another copy of experts": "places experts by their load (EPLB)",
    "another order of experts": "places experts by their load (EPLB)",
    "another loader": "SGLang's loader and the mapping table disagree on model.layers.0.mlp.gate_up_proj.weight",
}


def test_what_would_serve_another_model_is_refused_by_name(converted, tmp_path):
    variants = ("qwen3", "qwen3-moe", "qwen3-moe-mixed", "llama-bias", "glm4-moe")
    said = on_a_rank("refusals", str(tmp_path), {name: converted(name)[0][0] for name in variants})
    assert said.keys() == REFUSALS.keys()
    assert [name for name, sentence in REFUSALS.items() if sentence not in said[name]] == [], said


def test_what_sglang_derives_is_checked_and_made_anew(converted, tmp_path):
    directories = [converted(name)[0][0] for name in ("deepseek-v3", "glm4-moe")]
    latent, router = on_a_rank("derived", str(tmp_path), directories)
    assert latent["changed"] == [f"model.layers.1.self_attn.{name}" for name in ("w_kc", "w_vc")]
    assert router["changed"] == ["model.layers.1.mlp.gate._weight_fp32"]
    for found in (latent, router):
        assert len(found["all"]) > len(found["changed"]) and found["before"] == found["after"] == []


@pytest.fixture(scope="module")
def served(converted, tmp_path_factory):
    """What a real SGLang says before, between and after refits; and its trainer."""
    folder = tmp_path_factory.mktemp("served")
    checkpoints = converted("qwen3")
    sides = {"folder": str(folder), "port": free_port()}
    flags = flags_at(Path(checkpoints[0][1]), "")
    trainer, engine = run_on_ranks(
        2, "serve", sides, flags, checkpoints, module="refit_sglang_serving_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    return trainer, engine


def test_a_running_sglang_serves_what_it_would_have_loaded(served):
    _, engine = served
    assert engine["served"] == engine["loaded"]
    assert engine["served"][0] != engine["served"][1] and engine["before"] not in engine["served"]


def test_a_running_sglang_scores_as_transformers_does(served):
    _, engine = served
    assert engine["parity"] == [False, True]  # the checkpoint before, and the one that it has loaded last


def test_a_running_sglang_refuses_requests_until_its_weights_are_whole(served):
    _, engine = served
    assert engine["no plugin"].startswith(
        "this SGLang has no plugin of reshard: install reshard where SGLang is"
    )
    assert engine["unconnected"] == "this engine is not connected: call reshard_connect first"
    assert (
        engine["unfit"] == "this SGLang holds dummy weights (load_format='dummy'): refit it before it serves"
    )
    assert engine["version"] == "no error"
    assert engine["other version"] == "this SGLang serves weights of version 1, not 7"


def test_a_refit_under_a_request_is_refused_and_the_request_goes_on(served):
    [busy, _], engine = served
    assert "this SGLang has requests under way" in engine["busy"] and "requests under way" in busy
    assert engine["goes on"][1] == engine["served"][1]


def test_a_sleeping_sglang_is_refused_and_a_woken_one_refitted(served):
    [_, asleep], engine = served
    assert "this SGLang sleeps, and its weights have no memory" in engine["asleep"] and "sleeps" in asleep
    assert engine["woken"].startswith("this SGLang holds no weights since it released their memory")
    assert engine["mended"] == engine["served"][1]
