"""Refits of SGLang's real model classes: bit for bit what SGLang's own loader makes of the export, by the
same tests as vLLM's (`tests.tools.refits`)."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard import ReshardError
from reshard.engines.sglang.calls import call
from tests import install_sglang_cpu
from tests.digests.on_disk import expected
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.refit.test_blocks_engine import published
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.storage.test_wrapped import kimi_k25
from tests.tools.refits import refit

SECRET = "known to the members of a group"
# What published configs have, and transformers' class does not; and SGLang without a kernel for GPUs.
WITHOUT_FLA = {"hf_overrides": {"full_attention_interval": 4}, "disable_radix_cache": True}

# variant, Megatron's layout on how many ranks, SGLang's on how many, in the same processes
LAYOUTS = [
    ("llama-rope-tied", f"{PP} 2", 2, dict(tp=2), 2, False),
    ("qwen2", f"{TP} 2", 2, dict(tp=4), 4, False),  # twice the key heads
    ("qwen3", f"{TP} 2", 2, dict(tp=2, dp=2), 2, True),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, ep=2), 2, True),
    ("qwen2-moe", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2, ep=2), 4, True),
    ("phi4", f"{TP} 2", 2, dict(tp=2), 2, True),
    ("ling", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, ep=2, dp=2), 2, True),
    ("ling-bias", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2), 4, True),
    ("mistral", "", 1, {}, 1, True),
    ("mixtral", "", 1, {}, 1, True),
    ("deepseek-v3", f"{TP} 2 {EP} 2 {ETP} 1", 2, dict(tp=2, ep=2, dp=2), 2, True),
    ("glm4-moe", f"{PP} 2 {EP} 2 {ETP} 1", 4, dict(tp=2, pp=2, ep=2), 4, True),
    ("minimax-m2", f"{EP} 2 {ETP} 1", 4, dict(tp=2, dp=2, pp=2), 4, True),
    ("gpt-oss", f"{TP} 2 {ETP} 1", 2, dict(tp=2, attention_backend="triton"), 2, True),
    ("qwen3-next", f"{EP} 2 {ETP} 1", 2, dict(tp=2) | WITHOUT_FLA, 2, True),
    ("glm4-moe-lite", f"{PP} 2", 2, dict(pp=2), 2, True),
    ("deepseek-v32", "", 1, {}, 1, True),
    ("glm-moe-dsa-shared", f"{EP} 2 {ETP} 1", 2, dict(tp=2, ep=2), 2, True),
    ("olmoe-mha", "", 1, {}, 1, True),
]
# Before 0.5.17 SGLang serves them only beside their vision tower (`test_wrapped`).
if install_sglang_cpu.installed() and install_sglang_cpu.version() > (0, 5, 16):
    LAYOUTS += [
        ("qwen3.5", f"{TP} 2", 2, dict(tp=2, dp=2) | WITHOUT_FLA, 2, True),
        ("qwen3.5-moe", f"{EP} 2 {ETP} 1", 2, dict(tp=2, ep=2) | WITHOUT_FLA, 2, True),
    ]


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together"), LAYOUTS,
                         ids=lambda v: str(v).replace("-model-parallel-size", "").replace(" ", ""))  # fmt: skip
def test_a_refit_leaves_what_sglangs_own_loader_makes_of_the_export(
    variant, parallel, trainers, engine, engines, together, converted, tmp_path
):
    refit(converted(variant), parallel, trainers, engine, engines, together, tmp_path, into="SGLang")


def test_the_last_stage_of_a_tied_model_has_its_embedding_as_the_output(converted, tmp_path):
    refit(converted("qwen3-tied"), f"{PP} 2", 2, dict(pp=2), 2, True, tmp_path, into="SGLang", traced=True)


def test_a_family_without_sglang_names_goes_by_the_trace(converted, tmp_path):
    refit(converted("ernie"), f"{TP} 2", 2, dict(tp=2), 2, True, tmp_path, into="SGLang", traced=True)


# Experts, in one process and in two; latent attention, which derives matrices from its blocks.
BLOCKS = [
    ("served-moe-blocks", f"{EP} 2", 2, dict(tp=2, ep=2, dp=2), 2, True),
    ("served-mla-blocks", "", 1, {}, 1, False),
]


@pytest.mark.parametrize(("variant", "parallel", "trainers", "engine", "engines", "together"), BLOCKS)
def test_a_refit_into_fp8_blocks_leaves_what_sglang_loads_from_a_checkpoint_in_fp8(
    variant, parallel, trainers, engine, engines, together, converted, tmp_path
):
    checkpoints = converted(variant)
    loaded, overrides = published(checkpoints, tmp_path)
    reports = refit(
        checkpoints, parallel, trainers, engine | overrides, engines, together, tmp_path / "run",
        into="SGLang", published=loaded, ignored=["k_scale", "v_scale"],
    )  # fmt: skip
    assert all(report["launches"] > 0 for of_rank in reports for report in of_rank)


def on_ranks(ranks: int, function: str, *arguments) -> list:
    """Call a function of `refit_sglang_on_cpu` in processes with SGLang's packages."""
    return run_on_ranks(
        ranks, function, *arguments, module="refit_sglang_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip


def on_a_rank(function: str, *arguments):
    """Call one in a process."""
    return on_ranks(1, function, *arguments)[0]


REFUSALS = {
    "nothing": "no error",
    "biases of MLPs": "SGLang's LlamaForCausalLM does not take model.layers.0.mlp.gate_proj.bias",
    "a dense layer": "SGLang's Qwen3MoeForCausalLM does not take model.layers.1.mlp.gate_proj.weight",
    "runner": "is run by flashinfer_cutlass, which may keep experts in another order than loaded: start SGLang "
    "with --moe-runner-backend triton",
    "quantized": "serves from weights that SGLang's W8A8Fp8LinearMethod has changed",
    "shared experts": "start SGLang with --disable-shared-experts-fusion",
    "drafting": "drafts tokens by another model (--speculative-algorithm)",
    "weight cache": "(--weight-cache-mode), which a refit cannot write",
    "copies": (
        "model.layers.1 keeps copies of weights that SGLang does not make anew, and a refit does not bring: "
        "Restart without it."
    ),
    "ranks that come and go": "start it without that option, or without --enable-eplb",
    "another copy of experts": "no error",
    "another order of experts": "no error",
    "blocks": "no error",
    "packed scales": "start it with --fp8-gemm-backend triton and --moe-runner-backend triton",
    "cache in fp8": "scales its fp8 keys and values by numbers that load_format='dummy' has made up",
    "blocks of 64": "serves from weights that SGLang's Fp8LinearMethod has changed",
    "a tower": "tensors beside the language model are dummy weights (load_format='dummy')",
    "another loader": "SGLang's loader and the mapping table disagree on model.layers.0.mlp.gate_up_proj.weight",
}


def test_what_would_serve_another_model_is_refused_by_name(converted, tmp_path):
    variants = ("qwen3", "qwen3-moe", "qwen3-moe-mixed", "llama-bias", "glm4-moe")
    directories = {name: converted(name)[0][0] for name in variants}
    [directories["blocks"]], overrides = published(converted("served-mla-blocks")[:1], tmp_path)
    directories["kimi-k2.5"] = str(kimi_k25(tmp_path / "kimi"))
    said = on_a_rank("refusals", str(tmp_path), directories, overrides)
    assert said.keys() == REFUSALS.keys()
    assert [name for name, sentence in REFUSALS.items() if sentence not in said[name]] == [], said


def test_sglang_loads_a_megatron_checkpoint_as_what_was_exported_from_it(converted, tmp_path):
    """Each rank reads its own boxes; into fp8 blocks, the tensors that it takes a part of."""
    engines = {
        "qwen3-moe": dict(tp=2, ep=2),
        "deepseek-v3": dict(tp=2, ep=2),
        "qwen3-next": dict(tp=2, ep=2) | WITHOUT_FLA,
    }
    cases = [(*converted(name)[0], engine) for name, engine in engines.items()]
    checkpoints = converted("served-moe-blocks")[:1]
    [blocks], options = published(checkpoints, tmp_path)
    cases.append((blocks, checkpoints[0][1], options | dict(pp=2)))
    of_ranks = on_ranks(2, "load_megatron", str(tmp_path), cases)
    for *found, _ in of_ranks:
        assert [differ for differ, *_ in found] == [[]] * 4 and all(count > 20 for _, count, _ in found)
        *boxes, [streamed] = [logged for *_, logged in found]
        assert all(ways.endswith("each rank its own boxes") for _, ways in boxes), boxes
        assert "of them, for fp8 blocks" in streamed
        for (hf, _, _), (read, _) in zip(cases, boxes, strict=False):
            size = sum(file.stat().st_size for file in Path(hf).glob("*.safetensors"))
            share = int(read.rpartition(": ")[2].split(" bytes")[0].replace(",", "")) / size
            assert 0.45 < share < 0.75, (read, size)
    said = of_ranks[0][-1]
    assert said[0].endswith("to serve a Hugging Face directory") and "is not a Megatron checkpoint" in said[0]
    assert said[1].startswith("--model-loader-extra-config has threads beside 'megatron'")
    assert said[2] == "'megatron' in --model-loader-extra-config is 3, not a directory"
    assert said[3].startswith("Unexpected extra config keys"), "SGLang's own words"


def test_what_sglang_derives_is_checked_and_made_anew(converted, tmp_path):
    pairs = [tuple(hf for hf, _ in converted(name)) for name in ("deepseek-v3", "glm4-moe")]
    latent, router = on_a_rank("derived", str(tmp_path), pairs)
    assert latent["changed"] == [f"model.layers.1.self_attn.{name}" for name in ("w_kc", "w_vc")]
    # From 0.5.19 on GLM's routers have their weights in fp32, and no copies.
    copied = ["model.layers.1.mlp.gate._weight_fp32"] if install_sglang_cpu.version() < (0, 5, 19) else []
    assert router["changed"] == copied
    assert len(latent["all"]) > 2 and bool(copied) == (len(router["all"]) > 1)
    for found in (latent, router):
        assert found["before"] == found["after"] == []
        sentence, serves = found["not flushed"]
        assert "this SGLang did not flush its cache" in sentence and not serves, (
            "it fails while the trainer can tell"
        )
    # What SGLang itself loads into a running engine leaves the copies as they were: `docs/guides/refit/sglang.md`.
    assert latent["loaded"] == [] and router["loaded"] == (router["all"] if copied else [])


def test_stages_that_are_called_one_after_the_other_are_refitted_together(converted, tmp_path):
    """Their second call has the outcome; until then they refuse requests, also where it never comes."""
    checkpoints = converted("qwen3")
    sides = {"folder": str(tmp_path), "port": free_port()}
    trainer, first, second = run_on_ranks(
        3, "stages", sides, flags_at(Path(checkpoints[0][1]), ""), checkpoints, module="refit_sglang_stages_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(), may_die=True,
    )  # fmt: skip
    assert second is None, "the stage that died"
    assert first["loaded"] == first["after"] != first["before"] and first["flushed"] == 2
    assert first["waits"] == ["this SGLang connects or takes weights: ask again later"] * 4
    assert first["served"] == [0, None, 2] and first["taken"] == [True, False, True]
    assert first["busy"].startswith("this SGLang has requests under way")
    assert trainer["busy"] == f"inference rank 1: {first['busy']}"
    assert first["again"] == "the last call of this SGLang is still running: call reshard_join first"
    assert "inference rank 2" in trainer["died"] and "inference rank 2" in first["died"]


@pytest.fixture(scope="module")
def served(converted, tmp_path_factory):
    """What a real SGLang says before, between and after refits; and its trainer."""
    folder = tmp_path_factory.mktemp("served")
    checkpoints = converted("qwen3")
    sides = {
        "folder": str(folder),
        "port": free_port(),
        "http": free_port(),
        "again": free_port(),
        "secret": SECRET,
    }
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


def test_a_running_sglang_and_a_server_have_the_digest_of_what_they_serve(served, converted):
    _, engine = served
    texts = [expected(Path(hf), dtype="fp32")[0] for hf, _ in converted("qwen3")]
    assert engine["digests"] == engine["server digests"] == texts and texts[0] != texts[1]
    assert engine["unfit digest"] == engine["unfit"]


def test_a_running_sglang_scores_as_transformers_does(served):
    _, engine = served
    assert engine["parity"] == [False, True]  # the checkpoint before, and the one that it has loaded last


def test_a_server_with_pipeline_stages_is_refitted_by_its_own_routes(served):
    _, engine = served
    [of_one, of_two] = engine["deltas"]
    assert of_one == (1, engine["loaded"][1], "1") and of_two == (2, engine["loaded"][0], "2")
    one, two = (each[1] for each in engine["deltas"])
    *back, twice, reached, again = engine["back"]
    assert back == [1, one, "1"] and (reached, again) == (2, two), "bit for bit, and forward again"
    assert "400" in twice and "since it went back already" in twice
    assert engine["at once"] == ["no error"] * 10, "a request that has been answered is in nobody's way"
    assert "chain-not is not a chain of deltas" in engine["no chain"]
    answers, version = engine["by http"]
    assert answers == engine["loaded"][1] != engine["loaded"][0] and version == "5"
    assert engine["versions"] == [{"default"}, *({v} for v in "12125"), {"7"}, {"7"}], "what each answer says"
    assert "this engine is not connected: call reshard_connect first" in engine["no group"]
    assert "no call of this SGLang waits to be joined" in engine["nothing to join"]
    assert "400" in engine["options"] and "bucket_bytes" in engine["options"]


def test_a_server_with_pipeline_stages_is_a_member_of_a_fleet(served):
    trainer, engine = served
    assert trainer[-1] == [(6, ["pod-3"], {}), (7, ["pod-3"], {})]
    found = {"version": 7, "age": None, "connected": False, "why": None}
    assert trainer[-2] == [7, {"pod-3": found}, True], (
        "a trainer that comes later finds its version, and whose it is"
    )
    assert engine["by a fleet"] == (engine["loaded"][0], engine["server digests"][0])


def test_an_sglang_server_without_the_plugin_is_named_and_never_sees_a_secret(served):
    _, engine = served
    connected, applied, digested, seconds, answers, log = engine["no plugin"]
    assert ": this SGLang has no plugin of reshard: install reshard where SGLang is" in connected
    assert applied == digested == connected and seconds < 20
    assert answers == engine["loaded"][0], "its scheduler waits for nobody"
    assert "x" * 32 not in log and "/destroy_weights_update_group" in log, "the control: it logs its calls"


def test_an_sglang_server_refuses_a_refit_while_requests_run(served):
    _, engine = served
    sentence, seconds, ran_on, tokens = engine["under requests"]
    assert "400" in sentence and "this SGLang has requests under way" in sentence and seconds < 10
    assert ran_on and len(tokens) == 200


def test_a_running_sglang_follows_a_chain_until_something_else_writes_into_it(served):
    _, engine = served
    version, answers, back, again, at_the_end, lost, written_by_others = engine["deltas of an engine"]
    assert (version, answers) == (again, at_the_end) == (2, engine["served"][0])
    another, reached, gone_back = back
    assert "this SGLang goes back to version 1, and not to version 0" in another
    assert (reached, gone_back) == (1, engine["served"][1])
    assert "since others have written, moved or discarded weights since" in lost
    assert "neither the base of" in written_by_others and "load the base into it first" in written_by_others


def test_deltas_wait_for_the_requests_of_a_server_and_an_engine_refuses_them(served):
    _, engine = served
    said, _, ran_on, tokens = engine["read under requests"]
    assert said == "no error" and ran_on and len(tokens) == 200, "it serves while it reads them"
    said, _, ran_on, tokens = engine["deltas under requests"]
    assert said == "no error" and not ran_on and len(tokens) == 200
    assert "this SGLang has requests under way" in engine["deltas while busy"]


def test_a_running_sglang_refuses_requests_until_its_weights_are_whole(served):
    _, engine = served
    for said in engine["data parallel"]:
        assert said.endswith("start a server, and use connect_server and refit_server")
    assert engine["no such call"].startswith(
        "there is no reshard_refti: the calls are reshard_connect, reshard_refit"
    )
    assert engine["unconnected"] == "this engine is not connected: call reshard_connect first"
    assert (
        engine["unfit"] == "this SGLang holds dummy weights (load_format='dummy'): refit it before it serves"
    )
    assert engine["version"] == "no error"
    assert engine["other version"] == "this SGLang serves weights of version 1, not 7"


def test_sglangs_log_of_calls_does_not_show_their_secrets(served):
    _, engine = served
    calls = [line for line in engine["log"].splitlines() if "handle_rpc_request: reshard_" in line]
    with_secret = [line for line in calls if "'secret'" in line]
    assert len(calls) > len(with_secret) == 11, (
        "a connect, seven calls with a secret that apply_deltas and roll_back make, and three of a digest"
    )
    assert all("'secret': <hidden>" in line for line in with_secret) and SECRET not in engine["log"]


def test_an_sglang_without_the_plugin_says_how_to_get_it():
    def collective_rpc(method: str) -> None:
        raise AssertionError(f"'Scheduler' object has no attribute '{method}'")  # as SGLang says it

    arguments = SimpleNamespace(enable_dp_attention=False, pp_size=1)
    with pytest.raises(
        ReshardError, match="this SGLang has no plugin of reshard: install reshard where SGLang is"
    ):
        call(SimpleNamespace(server_args=arguments, collective_rpc=collective_rpc), "reshard_refit")


def test_a_refit_under_a_request_is_refused_and_the_request_goes_on(served):
    [busy, *_], engine = served
    assert "this SGLang has requests under way" in engine["busy"] and "requests under way" in busy
    assert engine["goes on"][1] == engine["served"][1]


def test_a_sleeping_sglang_is_refused_and_a_woken_one_refitted(served):
    [_, asleep, *_], engine = served
    assert "this SGLang sleeps, and its weights have no memory" in engine["asleep"] and "sleeps" in asleep
    assert engine["woken"].startswith("this SGLang holds no weights since it released their memory")
    assert engine["mended"] == engine["served"][1]
