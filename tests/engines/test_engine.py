"""A real vLLM on the CPU: refitted from a live Megatron model it serves what a vLLM serves that has
loaded the export."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, hf_to_mcore
from reshard.delta import save
from tests.install_vllm_cpu import environment_of_engine
from tests.starting.ranks import free_port, run_to_the_end, torchrun
from tests.starting.warm import python_of_engine
from tests.tools import lora_states
from tests.tools.checkpoints import make

ROOT = Path(__file__).parent.parent.parent
SECRET = "a secret of two workers and their trainer"
# MiniMax-M2 and gpt-oss are not among them: vLLM's build for the CPU has experts without a sigmoid
# unless in groups, and attention sinks in bf16 alone.
# What is served, from which layout of Megatron to which of vLLM, both on the same two ranks.
SERVED = [
    ("qwen2", dict(pp=2, vpp=2), dict(tensor_parallel_size=2)),
    ("qwen3", dict(tp=2), dict(tensor_parallel_size=2)),
    ("qwen3-moe", dict(ep=2, etp=1), dict(tensor_parallel_size=2)),
    ("deepseek-v3", dict(tp=2, ep=2, etp=1), dict(tensor_parallel_size=2)),
]
# What is compared with the Megatron that it is refitted from: every other family, and two of those.
COMPARED = ["llama", "qwen3-moe", "deepseek-v3", "glm4-moe", "mixtral", "olmoe"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Two checkpoints of a variant, each as (Hugging Face directory, Megatron directory)."""
    made = {}

    def get(name: str) -> list[tuple[str, str]]:
        if name not in made:
            made[name] = []
            for seed in (0, 1):
                folder = tmp_path_factory.mktemp(name)
                make(folder / "hf", f"served-{name}", seed=seed)
                hf_to_mcore(folder / "hf", folder / "mcore", MegatronLayout())
                made[name].append((str(folder / "hf"), str(folder / "mcore")))
        return made[name]

    return get


def run(folder: Path, ranks: int, function: str, *arguments):
    """What ``tests.FUNCTION``, or ``tests.on_cpu.engine_on_cpu.FUNCTION``, returns on the first of several
    processes."""
    (folder / "arguments").write_text(json.dumps(arguments))
    python = python_of_engine()
    started = [python] if ranks == 1 else torchrun(ranks, python)
    command = [
        *started,
        "-m",
        "tests.on_cpu.engine_on_cpu",
        function if "." in function else f"engine_on_cpu.{function}",
        str(folder / "arguments"),
        str(folder / "result"),
    ]
    done = run_to_the_end(command, 800, env=environment_of_engine(), cwd=ROOT)
    assert (folder / "result").is_file(), done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "result").read_text())


@pytest.fixture(scope="module")
def served(converted, tmp_path_factory):
    cases = [(name, layout, options, converted(name)) for name, layout, options in SERVED]
    return run(tmp_path_factory.mktemp("served"), 2, "refit_and_serve", cases)


@pytest.mark.parametrize("name", [case[0] for case in SERVED])
def test_a_live_vllm_serves_what_it_was_refitted_with(name, served):
    results = served[name]
    assert results["served"] == results["loaded"], "equal to the last bit"
    assert results["served"][0] != results["served"][1] and results["before"] not in results["served"]
    assert results["unfit"].startswith("this vLLM holds dummy weights (load_format='dummy')")
    assert not results["moved"] and results["version"] == 2
    assert not results["named"], "nothing is left in /dev/shm where the engine is killed"
    assert (
        results["refused"].startswith("this vLLM holds a half-written model")
        and results["mended"] == results["served"][1]
    )


def test_a_live_vllm_drafts_by_the_mtp_layers_that_it_was_refitted_with(tmp_path):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, "served-glm4-moe", seed=seed, mtp=True)
        hf_to_mcore(hf, mcore, MegatronLayout())
        pairs.append((str(hf), str(mcore)))
    outcome = run(tmp_path, 1, "drafting", pairs)
    for (answers, drafter), (loaded, drafter_loaded) in zip(
        outcome["refitted"], outcome["loaded"], strict=True
    ):
        assert answers == loaded and drafter == drafter_loaded
    (first, drafter), (second, other) = outcome["refitted"]
    assert first != second and all(drafter[name] != other[name] for name in drafter)
    assert list(outcome["accounts"].values()).count("brought") >= 17


def test_an_engine_that_serves_lora_adapters_is_refitted_below_them(converted, tmp_path):
    outcome = run(tmp_path, 1, "with_adapters", converted("qwen3"))
    assert outcome["refitted"] == outcome["loaded"], "equal to the last bit, with an adapter and without"
    (plain, adapted), (other, _) = outcome["refitted"]
    assert plain != other and plain != adapted
    assert len(outcome["adapters"]) == 1 and "left alone" in outcome["adapters"][0]


def test_a_trainers_adapter_is_served_by_name_as_vllm_serves_its_files_and_as_peft_computes_it(
    converted, tmp_path
):
    outcome = run(tmp_path, 1, "lora_serving_on_cpu.serve_policy", converted("qwen3")[0][0], str(tmp_path))
    assert "connect with adapter='NAME'" in outcome["plain"] and "dummy weights" in outcome["before"]
    for state, said in outcome["states"].items():
        assert lora_states.NAMED[state] in said, "another model than W + scale * B @ A"
    for of_refit, of_files, of_base, of_other, mixed in outcome["served"]:
        assert of_refit == of_files, "equal to the last bit"
        assert of_refit != of_base != of_other != of_refit
        assert mixed == [of_refit[0], of_other[1], of_refit[2]], "two adapters in one batch"
    assert outcome["served"][0][0] != outcome["served"][1][0], "the second refit brought another adapter"
    assert outcome["served"][0][2] == outcome["served"][1][2]
    assert max(*outcome["distances"], outcome["mended"]) < 1e-4
    assert outcome["request"]["lora_name"].startswith("policy@2-")
    assert outcome["by version"] == outcome["served"][1][0]
    assert (
        "does not hold 'policy@9' (any more)" in outcome["stale"] and "give it another id" in outcome["taken"]
    )
    running = outcome["running"]
    assert running["running"] == running["before"] != running["after"], "it ends with what it began with"
    assert "this vLLM holds other weights, for a test" in outcome["lost"] and outcome["weights"] == 2

    other = outcome["other base"]
    sentence = "adapter 'policy' cannot be served, since this vLLM holds other weights below it"
    assert sentence in other["running"] and sentence in other["new"] and not other["left"]
    assert max(other["distances"]) < 1e-4 and other["weights"] == [1, 1], "brought back once, and then held"

    closed = outcome["closed"]
    assert not closed["kept"] and not closed["pinned"] and closed["others"] == 3
    assert closed["done"] == [closed["done"][0]] * 3, "served on, from memory of ours"
    assert closed["removed"] and "holds no version of it" in closed["then"]
    assert "has rank 4, and this vLLM holds ranks up to 1" in closed["failed"] and closed["again"] < 1e-4


def same(one: list, other: list) -> bool:
    """Whether two answers are the same up to how sums of a larger batch round."""
    (tokens, logprobs), (other_tokens, other_logprobs) = one, other
    return tokens == other_tokens and max(map(lambda a, b: abs(a - b), logprobs, other_logprobs)) < 1e-4


@pytest.mark.parametrize("parallel", ["tensor", "data"])
def test_requests_keep_the_version_of_an_adapter_that_they_began_with_in_a_vllm_of_its_own(
    parallel, converted, tmp_path
):
    """Under load, with fewer slots than adapters, while trainers give versions the same number."""
    options = {f"{parallel}_parallel_size": 2}
    hf = converted("qwen3")[0][0]
    outcome = run(
        tmp_path, 1, "lora_process_on_cpu.policy_of_its_own", hf, str(tmp_path), free_port(), options
    )
    assert "this vLLM holds dummy weights" in outcome["early"], "answered"
    assert outcome["first"][0] == outcome["first"][1], "equal to the last bit"
    running, (before, after) = outcome["running"]
    assert outcome["ran"] and same(running, before) and not same(running, after), "all of one version"
    waiting, versions = outcome["waiting"]
    assert all([same(one, version) for version in versions].count(True) == 1 for one in waiting), "as each"
    assert same(*outcome["tenant"]), "another adapter, for which there is a slot in turns"
    new, served, of_files = outcome["same number"]
    assert served == of_files and same(new, served), "not from the cache of the version before"
    assert not same(served, outcome["first"][0])
    assert (
        all(map(same, outcome["several at once"], outcome["each alone"])) and outcome["by version"] == served
    )
    sentence, name, other = outcome["gone"]
    assert f"does not hold {name!r} (any more), but 'policy@8-" in sentence and "give it another id" in other
    if parallel == "tensor":
        apart, healed, of_files = outcome["apart"]
        assert "since the ranks of this vLLM hold different versions: refit it first" in apart
        assert healed == of_files, "equal to the last bit"
    assert outcome["closed"] and outcome["reconnected"][0] == outcome["reconnected"][1] != served
    assert set(outcome["held"]) == {1}, "the others are dropped"


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM's build for the CPU has int8 experts where that knows bf16 in AVX512",
)
def test_experts_that_vllm_quantizes_and_packs_itself_serve_what_they_serve_after_loading(tmp_path):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, "served-int8", torch.bfloat16, seed=seed)
        hf_to_mcore(hf, mcore, MegatronLayout())
        pairs.append((str(hf), str(mcore)))
    outcome = run(tmp_path, 1, "engine_quantized_on_cpu.int8_experts", pairs)
    assert outcome["refitted"] == outcome["loaded"], "equal to the last bit"
    assert (
        outcome["refitted"][0] != outcome["refitted"][1]
        and not outcome["moved"]
        and "torch.int8" in outcome["dtypes"]
    )
    assert outcome["quantized"] == [
        {"how": "Int8OnlineMoEMethod of vLLM, by a slab", "kernel": "CPU", "layers": 4}
    ]
    report = outcome["parity"]
    assert (
        "int8_per_channel_weight_only" in report["b"]
        and report["ok"]
        and 0 < report["overall"]["mean_abs"] < 0.04
    )
    assert report["limits"]["mean_abs"] is None and report["limits"]["noise_ratio"] == 2.0
    assert report["quantized"] and 0.5 < report["rounding"]["ratio"] < 2
    others = outcome["parity of others"]
    assert not others["ok"] and others["rounding"]["low"] > 2, "two models of random weights"
    sentences = (
        "is for a system with vllm: before it",
        "match_vllm_rounding is for a vLLM that is refitted",
        "with quantization nonsense: ",
        "with quantization torchao: ",
        "limits gives a NoneType for fp8",
        "without any limit the gate cannot fail",
    )
    for results, sentence in zip(outcome["parity refused"], sentences, strict=True):
        assert sentence in results, results


def test_a_vllm_in_processes_of_its_own_is_refitted_under_load(converted, tmp_path):
    """Its config has a field that nothing maps, which the trainer's process is told to ignore."""
    (hf, mcore), other = converted("qwen3")
    strange = tmp_path / "hf"
    shutil.copytree(hf, strange)
    config = json.loads((strange / "config.json").read_text()) | {"clip_qkv": 8.0}
    (strange / "config.json").write_text(json.dumps(config))
    half = partly(other[0], hf, tmp_path / "half")
    save(other[0], half, tmp_path / "chain", version=6)
    save(half, hf, tmp_path / "chain")
    outcome = run(
        tmp_path,
        1,
        "engine_process_on_cpu.engine_of_its_own",
        [(str(strange), mcore), other],
        free_port(),
        free_port(),
        str(tmp_path / "chain"),
    )
    for sentence in outcome["refused"]:
        assert "clip_qkv = 8.0 may make another model of the same weights" in sentence
        assert 'reshard.ignored_config_fields("clip_qkv") around the trainer\'s connect, or ' in sentence
        assert "RESHARD_IGNORE_CONFIG_FIELDS=clip_qkv in the engine's environment" in sentence
    assert (
        "vLLM's config has clip_qkv 8.0, but the chain's base has None" in outcome["deltas of another config"]
    )
    assert "base.json): start it with that base, " in outcome["deltas of another config"]
    for step in ("first", "second"):
        trainer, engine = outcome[step]
        assert len(engine) == len(trainer) == 8 and trainer == pytest.approx(engine, abs=1e-4)
    assert outcome["first"][1] != pytest.approx(outcome["second"][1], abs=1e-2)
    assert [report["version"] for report in outcome["first report"]] == [1] and outcome["first report"][0][
        "received_bytes_nccl"
    ] > 1e6
    before, after, all_of_them = outcome["in flight"]
    assert outcome["running before"] and outcome["running after"] and 0 < before <= after < 240 == all_of_them
    assert [report["version"] for report in outcome["second report"]] == [2]
    engine, trainer = outcome["failed"]
    assert "the trainer's digests are gone" in engine and "the trainer's digests are gone" in trainer
    assert outcome["version then"] == [None] and outcome["waited"] and outcome["version at last"] == [4]
    assert outcome["deltas"] == [[6, 7, 6, 7], outcome["first"][1], [7]], "equal to the last bit"
    assert outcome["deltas back"], "to the last bit, and forward again"
    at = outcome["while read"]
    assert at["after reshard_delta_prepare"] + 3 < at["before the pause"] < 240 == at["all"], at

    dummy, half = (
        "dummy weights (load_format='dummy')",
        "a half-written model, since a refit failed or is under way",
    )
    for what, (*requests, states) in ((dummy, outcome["dummy"]), (half, outcome["half-written"])):
        sentence = f"this vLLM holds {what}: refit it before it serves"
        assert requests == [["EngineRefusedError", sentence, True]] * 2
        since = [state.pop("since") for state in states]
        of_none = {"version": None, "origin": ""}
        assert states == [{"ready": False, **of_none, "refusal": sentence, "asleep": False}]
        assert all(0 < time.time() - one < 600 for one in since)
    assert outcome["version of a half-written one"] == [None]
    logprobs, states = outcome["whole again"]
    assert logprobs == outcome["second"][1], "equal to the last bit"
    assert states == [
        {"ready": True, "version": 9, "origin": "", "refusal": "", "since": None, "asleep": False}
    ]


def test_an_llm_whose_workers_fail_answers_in_a_sentence_and_serves_what_comes_next(converted, tmp_path):
    """Which of the workers fails makes no difference: vLLM takes what others answer for answers to its next call."""
    log = tmp_path / "log"
    arguments = converted("qwen3"), free_port(), str(log), SECRET
    outcome = run(tmp_path, 1, "engine_process_on_cpu.two_workers", *arguments)
    half = "a half-written model, since a refit failed or is under way"
    steps = {"dummy": "dummy weights (load_format='dummy')"}
    for who in ((1,), (0,), (0, 1)):
        steps[f"{who} failed"] = half
        engine, trainer = outcome[f"refit that {who} fail"]
        for worker in who:
            assert f"the digests of worker {worker} are gone" in engine + trainer
    for step, held in steps.items():
        sentence = f"this vLLM holds {held}: refit it before it serves"
        assert outcome[step]["answers"] == [sentence] * 2
        assert [state["refusal"] for state in outcome[step]["states"]] == [sentence] * 2
        assert outcome[step]["versions"] == (None if step == "dummy" else [None, None])
    assert [outcome[step] for step in ("connected", "first refit", "second refit")] == [["no error"] * 2] * 3
    for step in ("first", "second"):
        engine, trainer = outcome[step]
        for (logprobs, _), expected in zip(engine, trainer, strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-4)
    assert outcome["first"][0] != outcome["second"][0], "the control: they are two models"
    assert [state["version"] for state in outcome["then"]] == [3, 3]
    said = log.read_text()
    assert said.count("refused requests from here on: this vLLM holds") == 2
    # Versions of vLLM log tracebacks of other things.
    assert said.count("collective_rpc: ") == 4 and "/reshard/engines/" not in said
    assert outcome["too few"] in said and SECRET not in said, "the failed call, without its secret"


def test_an_engine_is_refitted_from_another_of_other_sizes_as_from_a_trainer(converted, tmp_path):
    """The oracle is what vLLM's own loader has put into each worker."""
    (hf, _), _ = converted("qwen3")
    ports = [free_port(), free_port()]
    outcome = run(tmp_path, 1, "engine_process_on_cpu.engine_from_engine", hf, ports)
    for sizes, (source, engine) in {"1 to 2": (1, 2), "2 to 1": (2, 1)}.items():
        said = outcome[sizes]
        assert [said[step] for step in ("connect", "refit", "next refit")] == [["no error"] * 2] * 3, sizes
        assert said["refitted"] == said["loaded"] and len(said["loaded"]) == engine
        assert said["scribbled"][0] != said["loaded"][0], "a control"
        for before, after in zip(said["refitted"], said["flipped"], strict=True):
            assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
        assert said["versions"] == [[None] * source, [3] * engine]
        sentence = (
            "this vLLM holds weights that vLLM has discarded, and nothing is read from it: refit it first"
        )
        assert all(sentence in one for one in said["lost"]) and said["ready"] == [True] * engine


def partly(old: str, new: str, to: Path) -> Path:
    """Write a checkpoint of which every other element is that of another one."""
    shutil.copytree(old, to)
    weights, others = (load_file(Path(path) / "model.safetensors") for path in (old, new))
    for name, weight in weights.items():
        weight.view(-1)[::2] = others[name].view(-1)[::2]
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def compared(converted, tmp_path_factory):
    cases = [(name, *converted(name)[0]) for name in COMPARED]
    return run(tmp_path_factory.mktemp("compared"), 1, "compare", cases, converted(COMPARED[0])[1][0])


@pytest.mark.parametrize("name", COMPARED)
def test_megatron_and_the_vllm_that_it_refits_say_the_same(name, compared):
    report = compared["refitted"][name]
    assert report["ok"] and report["overall"]["tokens"] == 3 * (8 + 32), report["exceeded"]
    assert report["overall"]["max_abs"] < 1e-4 and report["overall"]["mean_abs"] < 1e-6
    assert (
        report["overall"]["argmax_agreement"] == 1.0
        and abs(report["overall"]["kl"]) < 1e-6
        and report["overall"]["kl_tokens"] == 120
    )
    assert report["b"].startswith("vLLM, refitted from ") and report["a"].startswith("Megatron-Core, ")


def test_vllm_as_it_loads_and_as_it_runs_is_compared_with_transformers(compared):
    for report in (compared["live"], compared["loaded"]):
        assert (
            report["ok"]
            and report["overall"]["max_abs"] < 1e-4
            and report["overall"]["argmax_agreement"] == 1.0
        )
    noise = compared["loaded"]["noise"]
    assert noise["A again"]["max_abs"] == 0 and 1e-4 < noise["A in bf16"]["mean_abs"] < 0.05
    other = compared["other"]
    assert not other["ok"] and other["exceeded"][0].startswith("max_abs is ")
    for report in (compared["loaded"], other):
        causes = report["causes"]
        assert sum(cause["mean_abs"] for cause in causes["causes"]) == pytest.approx(causes["mean_abs"])
    [weights] = [cause for cause in other["causes"]["causes"] if cause["name"] == "weights"]
    assert weights["mean_abs"] == pytest.approx(other["overall"]["mean_abs"], rel=0.01), (
        "A vLLM with B's weights"
    )


def test_what_an_engine_does_not_say_is_missed(compared):
    sentences = [
        (
            "serves from weights that vLLM has packed for the CPU, which a refit cannot write: make it inside "
            "`with reshard.engines.vllm.compat.plain_weights"
        ),
        "prompt 0 has 9 tokens, the engine gives logprobs of 0 instead of 8: ask for prompt_logprobs=1",
        "prompt 1 has 33 tokens, the engine gives logprobs of 30 instead of 32",
        "prompt 2: the engine gives no logprob for token 1, which is 17",
        "the engine gives 2 outputs for 3 prompts",
        "vLLM at TP2 needs 2 processes, and there are 1: start it with torchrun --nproc-per-node 2 --no-python reshard",
        "vLLM at PP2 cannot be scored in processes of torchrun",
    ]
    for outcome, sentence in zip(compared["refused"], sentences, strict=True):
        assert sentence in outcome
