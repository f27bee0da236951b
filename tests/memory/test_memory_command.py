"""`reshard memory`: the command, the search for a layout, the phases of an RL step."""

import json
import resource

import pytest
from click.testing import CliRunner

import reshard
from reshard import MegatronLayout, ReshardError, VllmLayout
from reshard.cli.failures import status_of
from reshard.cli.main import cli
from reshard.memory.activations import uncounted
from reshard.memory.estimate import estimate_memory
from reshard.memory.phases import EngineSetup
from reshard.memory.report import Phase
from reshard.refit.options import BUCKET_BYTES
from tests.memory.test_memory_measured import GIB, QWEN, of
from tests.models.test_published import PUBLISHED
from tests.tools.checkpoints import model


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name in ("Qwen3-30B-A3B", "Llama-3.1-70B", "DeepSeek-V3"):
        (folder / f"{name}.json").write_text(json.dumps(PUBLISHED[name][0]))
    return lambda name: str(folder / f"{name}.json")


def run(config: str, *arguments: str):
    return CliRunner().invoke(cli, ["memory", "--model", config, *arguments])


def test_the_command_answers_yes_no_and_not_surely(configs):
    layout = ["--tp", "2", "--ep", "8", "--etp", "1", "--gpus", "16"]
    yes, no, between = (
        run(configs("Qwen3-30B-A3B"), *layout, "--gpu-memory", size) for size in ("H200", "40GB", "72GiB")
    )
    assert [done.exit_code for done in (yes, no, between)] == [0, 1, 1]
    assert "yes: it fits" in yes.output and "no: it does not fit" in no.output and "maybe: " in between.output
    assert "peak: stage 0" in yes.output and "TP2 EP8 ETP1 DP8" in yes.output
    assert run(configs("Qwen3-30B-A3B"), *layout).exit_code == 0


def test_the_command_the_call_and_megatrons_names_say_the_same(configs):
    ours = ["--tp", "4", "--pp", "2", "--dp", "2", "--recompute", "uniform:2", "--json"]
    theirs = ["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2", "--world-size", "16",
              "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2",
              "--json"]  # fmt: skip
    a, b = (json.loads(run(configs("Llama-3.1-70B"), *line).stdout) for line in (ours, theirs))
    assert a == b
    report = reshard.estimate_memory(
        configs("Llama-3.1-70B"), MegatronLayout(tp=4, pp=2), dp=2, recompute="uniform:2"
    )
    assert [stage["allocated"] for stage in a["stages"]] == [stage.allocated for stage in report.stages]
    for stage in report.stages:
        assert stage.static + stage.activations + stage.transient == stage.allocated
        assert sum(stage.tensors.values()) == pytest.approx(stage.activations, abs=len(stage.tensors))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tp", "3"], 1, "--tp 3 does not divide"),
        (["--gpus", "12", "--tp", "8"], 2, "--gpus 12 is not a multiple of tp 8"),
        (["--gpus", "16", "--dp", "3"], 2, "--gpus 16 makes dp 16, but --dp is 3"),
        (["--ep", "8", "--dp", "4"], 2, "ep 8 x etp 1 do not divide"),
        (["--recompute", "attention"], 2, "'attention' is not one of"),
        (["--recompute", "full", "--recompute-granularity", "full"], 2, "say the same"),
        (["--pp", "4", "--vpp", "2", "--num-microbatches", "6"], 2, "leave 2 after groups of 4"),
        (["--optimizer-offload", "2"], 2, "between 0 and 1"),
        (["--imbalance", "nan"], 2, "--imbalance is nan"),
        (["--gpu-memory", "lots"], 2, "not a size such as 80GB"),
        (
            ["--gpus", "1", "--engine", "tp=2", "--gpu-memory", "H100", "--colocated"],
            2,
            "do not fit on the trainer's 1 GPUs",
        ),
        (["--engine", "tp=2"], 2, "--engine needs --gpu-memory"),
        (["--fit", "--gpus", "8"], 2, "--fit needs --gpu-memory"),
        (
            ["--fit", "--gpus", "8", "--gpu-memory", "H100", "--recompute", "full"],
            2,
            "--fit chooses --recompute itself",
        ),
        (["--fit", "--gpus", "8", "--gpu-memory", "H100", "--engine", "tp=2"], 2, "for training alone"),
        (["--fit", "--gpus", "8", "--gpu-memory", "H100", "--tensors"], 2, "--tensors shows one layout"),
        (["--recompute", ""], 2, "--recompute : '' is not one of none, full"),
        (["--delta", "gpu"], 2, "--delta needs --engine"),
        (["--changed", "0.01"], 2, "--changed needs --engine"),
        (["--refit-from-host"], 2, "--refit-from-host needs --engine"),
        (["--trainer-offload", "weights"], 2, "--trainer-offload needs --engine"),
        (["--separate"], 2, "--colocated/--separate needs --engine"),
        (
            ["--mem-fraction-static", "0.5"],
            2,
            "--gpu-memory-utilization/--mem-fraction-static needs --engine",
        ),
        (["--at-most-tp", "4", "--gpu-memory", "H100"], 2, "--at-most-tp needs --fit"),
        (
            ["--engine", "tp=2", "--gpu-memory", "H100", "--mem-fraction-static", "1.5"],
            2,
            "share of a GPU is 1.5",
        ),
        (["--tp", "2", "--no-sequence-parallel"], 1, "only with sequence parallelism"),
        (["--tp", "4", "--seq-length", "4094"], 2, "pass --seq-length 4096"),
        (["--main-params", "int16", "--no-distributed-optimizer"], 2, "needs the distributed optimizer"),
        (["--html", "/nowhere/page.html"], 1, "is not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(configs, arguments, code, said):
    done = run(configs("Qwen3-30B-A3B"), *arguments)
    found = status_of_result(done)
    assert found[0] == code and said in found[1]


@pytest.mark.parametrize(("variant", "modules"), [
    ("deepseek-v32", "core_attention.indexer.k_norm, "), ("qwen3-next", "A_log, conv1d, dt_bias, in_proj and "),
])  # fmt: skip
def test_activations_of_modules_that_are_not_counted_are_named(variant, modules):
    [note] = uncounted(model(variant))
    assert f"what layers keep for {modules}" in note
    assert note in estimate_memory(model(variant)).notices


def test_activations_of_most_families_are_all_counted():
    names = ("Llama-3.1-70B", "Qwen2.5-7B", "Qwen3-30B-A3B", "DeepSeek-V3", "GLM-4.5", "Moonlight-16B-A3B")
    assert not any(uncounted(of(name)) for name in names)


def test_a_sequence_that_tp_does_not_divide_names_what_does(configs):
    """Without experts sequence parallelism can be left out, too; either way it is planned then."""
    found = status_of_result(run(configs("Llama-3.1-70B"), "--tp", "4", "--cp", "2", "--seq-length", "4092"))
    assert found[0] == 2 and found[1].endswith("pass --seq-length 4096, or --no-sequence-parallel")
    for options in (["--seq-length", "4096"], ["--seq-length", "4092", "--no-sequence-parallel"]):
        assert run(configs("Llama-3.1-70B"), "--tp", "4", "--cp", "2", *options).exit_code == 0


def status_of_result(done) -> tuple[int, str]:
    """The exit code that `main` makes of what a command raised, and its sentence."""
    if isinstance(done.exception, ReshardError):
        return status_of(done.exception), str(done.exception)
    return done.exit_code, done.output


def test_what_fits_is_what_the_estimate_says_fits(configs):
    limits = [
        "--fit",
        "--gpu-memory",
        "40GB",
        "--at-most-tp",
        "4",
        "--seq-length",
        "8192",
        "--json",
        "--show",
        "5",
    ]
    found = json.loads(run(configs("Qwen3-30B-A3B"), *limits, "--gpus", "16").stdout)
    assert 0 < len(found["layouts"]) <= 5 and found["looked_at"] > 20
    for one in found["layouts"]:
        assert one["layout"]["tp"] <= 4
        options = {
            "gpus": 16,
            "seq_length": 8192,
            "recompute": one["recompute"],
            "optimizer_offload": one["offload"],
        }
        again = estimate_memory(
            QWEN,
            MegatronLayout(**one["layout"]),
            gpu_memory="40GB",
            num_microbatches=one["microbatches"],
            **options,
        )
        assert (again.peak.total_band.high, again.fits) == (one["high"], True if one["surely"] else None)
    assert run(configs("DeepSeek-V3"), "--gpus", "8", "--gpu-memory", "H100", "--fit").exit_code == 1


# An engine's sizes, and the GiB of the rest of it, at most: vLLM's are in its share, SGLang's beside it.
@pytest.mark.parametrize(("engine", "rest"), [("tp=2", 8), ("sglang:tp=2", 1), ("sglang:tp=4,dp=2", 1)])
def test_the_phases_of_a_step(engine, rest, configs):
    line = [
        "--tp",
        "2",
        "--ep",
        "8",
        "--etp",
        "1",
        "--gpus",
        "16",
        "--gpu-memory",
        "H200",
        "--engine",
        engine,
        "--json",
    ]
    phases = {
        phase["name"]: phase
        for phase in map(as_dict, json.loads(run(configs("Qwen3-30B-A3B"), *line).stdout)["phases"])
    }
    # 48 layers, keys and values of 2 heads of 128 on a rank, 2 bytes: 49152 bytes a token; the
    # weights are 28.4 GiB, with experts over four ranks 14.9
    low, high = phases["generate"]["kv_tokens"]
    weights = 14.9 if "tp=4" in engine else 28.4
    assert (0.9 * 139.8 - weights - 0.1 - rest) * GIB / 49152 < low < high
    assert high < (0.9 * 139.8 - weights + 0.1) * GIB / 49152
    # SGLang's graphs and activations come on top of its share.
    assert ("engine: weights, keys and values" in phases["generate"]["parts"]) == engine.startswith("sglang:")
    assert phases["train"]["parts"]["trainer's weights"] == phases["sync"]["parts"]["trainer's weights"]
    assert sum(phases["logprob"]["parts"].values()) < sum(phases["train"]["parts"].values())


def test_what_is_kept_for_deltas_is_a_row_of_the_trainers_phases_or_of_the_host(configs):
    line = "--tp 2 --ep 8 --etp 1 --gpus 16 --gpu-memory H200 --engine tp=2 --separate".split()
    plain, on_gpu, on_host = (
        json.loads(run(configs("Qwen3-30B-A3B"), *line, *more, "--json").stdout)
        for more in ((), ("--delta", "gpu"), ("--delta", "host"))
    )
    assert on_host["delta_host_bytes"] == 8 * max(map(int, (s["weights"] for s in plain["stages"])))
    assert (
        on_host["phases"] == plain["phases"] and on_gpu["delta_host_bytes"] == plain["delta_host_bytes"] == 0
    )
    for before, after in zip(map(as_dict, plain["phases"]), map(as_dict, on_gpu["phases"]), strict=True):
        kept = after["parts"].pop("kept for deltas", 0)
        assert after["parts"] == before["parts"]
        assert kept == (0 if after["gpus"] == "engine's" else plain["stages"][0]["weights"])
        assert [bound - kept for bound in after["total_band"]] == before["total_band"]
    shown = run(configs("Qwen3-30B-A3B"), *line, "--delta", "gpu").stdout
    assert "of which kept for deltas: " in shown
    assert (
        "GiB kept for deltas for the GPUs of a host"
        in run(configs("Qwen3-30B-A3B"), *line, "--delta", "host").stdout
    )


def test_changes_that_wait_for_a_switch_are_counted_on_both_sides(configs):
    line = "--tp 2 --ep 8 --etp 1 --gpus 16 --gpu-memory H200 --engine tp=2 --separate --delta gpu".split()
    config = configs("Qwen3-30B-A3B")
    plain, begun, all_change = (
        json.loads(run(config, *line, *more, "--json").stdout)
        for more in ((), ("--changed", "0.01"), ("--changed", "1"))
    )
    [weights, *_] = (stage["weights"] for stage in plain["stages"])
    for before, after, most in zip(
        *(map(as_dict, report["phases"]) for report in (plain, begun, all_change)), strict=True
    ):
        pending = after["parts"].pop("pending changes")
        assert most["parts"]["pending changes"] == 2 << 30, "at most pending_bytes"
        if after["gpus"] == "engine's":
            assert after["parts"].pop("where pending changes go") == pending
            low, high = (b - a for a, b in zip(before["total_band"], after["total_band"], strict=True))
            assert (low, high) == (2 * pending, 3 * pending)
        else:
            assert pending == round(0.01 * weights) * 2, "two bytes of value and two of position of each"
        assert after["parts"] == before["parts"]
    shown = run(config, *line, "--changed", "0.01").stdout
    assert "GiB of a trainer's GPU" in shown and "GiB of an engine's GPU" in shown
    for wrong, why in (
        ("--separate --changed 0.01", "which --delta asks for"),
        ("--delta gpu --changed 0.01 --colocated", "--separate"),
        ("--separate --delta gpu --changed 1.5", "above 0 and at most 1"),
    ):
        refused = run(config, *line[:-3], *wrong.split())
        assert refused.exit_code == 1 and why in str(refused.exception)


def test_a_refit_from_host_memory_needs_a_slab_in_the_place_of_the_weights(configs):
    line = "--tp 2 --ep 8 --etp 1 --gpus 16 --gpu-memory H200 --engine tp=2".split()
    plain, from_host = (
        {
            phase["name"]: phase
            for phase in map(
                as_dict, json.loads(run(configs("Qwen3-30B-A3B"), *line, *more, "--json").stdout)["phases"]
            )
        }
        for more in ((), ("--refit-from-host",))
    )
    before, after = plain.pop("sync")["parts"], from_host.pop("sync")["parts"]
    assert before.pop("trainer's weights") > after.pop("the refit's slab") == BUCKET_BYTES
    assert before == after and plain == from_host, "the other phases are the same"
    kept = run(configs("Qwen3-30B-A3B"), *line, "--refit-from-host", "--trainer-offload", "grads")
    assert "the weights are not offloaded" in str(kept.exception)


def test_the_phases_of_a_step_that_was_measured():
    """Qwen3-8B's widths with 12 layers, and a vLLM with half of an H200
    (benchmarks/results/2026-11-23-rl-step.md); the controls are an engine with less and a trainer
    that stays."""
    found = of(
        "Qwen3-32B", num_hidden_layers=12, hidden_size=4096, intermediate_size=12288, num_attention_heads=32
    )
    options = dict(
        gpus=1,
        num_microbatches=1,
        imbalance=1.0,
        gradient_accumulation_fusion=False,
        gpu_memory=int(139.8 * GIB),
    )

    def bands(**engine) -> dict:
        phases = estimate_memory(
            found, MegatronLayout(), **options, engine=EngineSetup(VllmLayout(), **engine)
        ).phases
        return {phase.name: [bound / GIB for bound in phase.total_band] for phase in phases}

    measured = {"generate": 78.1, "sync": 21.1, "logprob": 18.4, "train": 75.5}
    for name, (low, high) in bands(utilization=0.5).items():
        assert low - 0.2 < measured[name] < high, name
    assert bands(utilization=0.45)["generate"][1] < measured["generate"]
    assert bands(utilization=0.5, offload=("grads", "optimizer"))["generate"][0] > measured["generate"] - 1


def as_dict(phase: list) -> dict:
    """A NamedTuple, which JSON has as a list."""
    return dict(zip(Phase._fields, phase)) if isinstance(phase, list) else phase


def test_the_page_has_every_stage_and_part(configs, tmp_path):
    page = tmp_path / "memory.html"
    line = [
        "--tp",
        "4",
        "--pp",
        "4",
        "--gpus",
        "32",
        "--gpu-memory",
        "H100",
        "--engine",
        "tp=8",
        "--html",
        str(page),
    ]
    run(configs("Llama-3.1-70B"), *line)
    text = page.read_text(encoding="utf-8")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk
    try:
        failed = run(configs("Llama-3.1-70B"), *line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"--html: cannot write {page}: File too large" in str(failed.exception)
    assert page.read_text(encoding="utf-8") == text and list(tmp_path.iterdir()) == [page]
    for said in (
        "llama (80 layers)",
        "The phases of an RL step",
        "main parameters",
        "tokens of keys and values",
        "gate and up",
    ):
        assert said in text
