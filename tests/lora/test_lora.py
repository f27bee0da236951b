"""LoRA adapters: what Megatron-Bridge's own modules save becomes PEFT's files and gives the same logits there, and
the way back is loaded by Megatron's own loader."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import (
    check,
    diff,
    hf_to_mcore,
    lora_merge,
    lora_to_megatron,
    lora_to_peft,
    mcore_to_hf,
)
from tests.integrations import test_swift
from tests.lora.test_lora_files import adapter
from tests.megatron.test_logits import EP, ETP, PP, TOLERANCE, TP, VPP, flags_at
from tests.starting import fork_server
from tests.starting.ranks import torchrun
from tests.tools.environments import REPOSITORY, attempt, clean, environment_before_ours
from tests.tools.oracle import hf_tensors, same

pytestmark = pytest.mark.install
PACKAGES = [*test_swift.PACKAGES, "megatron-bridge==0.6.2"]
CANONICAL = [
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_up",
    "linear_fc1_gate",
    "linear_fc2",
]
LATENT = [
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]
RANK, ALPHA = 4, 10
# Variant, kind of adapter, its target modules, how it is saved and how it is loaded again, with the numbers of ranks.
CASES = [
    ("qwen3", "lora", None, f"{TP} 2", 2, f"{PP} 2", 2),
    ("qwen3", "lora", None, f"{PP} 2 {VPP} 2", 2, f"{TP} 2", 2),
    ("qwen3-moe-mixed", "lora", None, f"{TP} 2 {EP} 2 {ETP} 1", 2, "", 1),
    ("llama", "lora", ["linear_qkv", "linear_fc2"], f"{TP} 2 {PP} 2", 4, "", 1),
    ("phi4", "lora", None, f"{TP} 2", 2, "", 1),
    ("llama", "canonical", CANONICAL, f"{TP} 2 {PP} 2", 4, f"{TP} 2", 2),
    ("qwen3-moe", "lora", None, f"{TP} 2 {EP} 2 {ETP} 1", 2, f"{PP} 2", 2),
    ("deepseek-v3", "lora", LATENT, f"{PP} 2 {TP} 2 {EP} 2 {ETP} 1", 4, "", 1),
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """The Python of an environment with Megatron-Bridge and mcore-bridge, which finds this one's packages
    behind its own, and has imported what takes long."""
    python = environment_before_ours(tmp_path_factory.mktemp("lora") / "venv", PACKAGES)
    modules = (
        "tests.starting.lora_imports", "tests.starting.command_line", "tests.starting.torchrun_methods",
        "swift.model.models.qwen",  # vLLM's plugin of ms-swift
        "tests.on_cpu.vllm_on_cpu", "tests.tools.refit_sides", "reshard.engines.vllm.live",
        "vllm.v1.worker.lora_model_runner_mixin", "torch.utils.serialization", "torch.distributed.run",
    )  # fmt: skip
    return fork_server.python(*modules, environment=variables(), executable=str(python))


def variables() -> dict[str, str]:
    ours = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "NVTE_PROJECT_BUILDING": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return clean() | ours


def on_ranks(python, ranks: int, action: str, folder: Path, module="tests.on_cpu.lora_on_cpu", **arguments):
    """What the last stage's first rank gives for an action, such as logits; None of an action that gives nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(arguments))
    result = folder / f"{action}.pt"
    command = [*torchrun(ranks, python), "-m", module, action, result, folder / "arguments.json"]
    done = attempt(command, env=variables(), cwd=REPOSITORY, timeout=600)
    errors = [line for line in done.stderr.splitlines() if line.startswith("[rank") or "Error" in line]
    assert not done.returncode, "\n".join(errors)[-3000:]
    return torch.load(result) if result.exists() else None


def tokens() -> torch.Tensor:
    return torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(1))


def with_peft(model: Path, adapter: Path, dtype=torch.float32):
    """transformers' model with PEFT's adapter."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    return PeftModel.from_pretrained(base, adapter)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def distance(of_megatron: torch.Tensor, model) -> float:
    wanted = logits(model)
    return float((of_megatron[..., : wanted.shape[-1]] - wanted).abs().max())


def merged(model: Path, adapter: Path, folder: Path) -> "AutoModelForCausalLM":
    """transformers' model with the sum of the weights, by matrices of PEFT's files in float64: PEFT 0.21 drops the
    adapters of dense layers and shared experts beside those of routed experts."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, pairs = hf_tensors(model), load_file(adapter / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." not in name:
            continue
        weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        b, scale = pairs[name.replace("lora_A", "lora_B")], config["lora_alpha"] / config["r"]
        tensors[weight] = (tensors[weight].double() + scale * b.double() @ a.double()).to(
            tensors[weight].dtype
        )
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def changed(adapter: Path, folder: Path, change) -> Path:
    """A copy of PEFT's files, with tensors and config changed."""
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def saved(python, source: Path, folder: Path, kind: str, targets, parallel: str, ranks: int, **settings):
    """An adapter that Megatron-Bridge's modules saved, and their logits with it."""
    iteration = folder / "theirs" / "iter_0000005"
    iteration.mkdir(parents=True)
    (folder / "theirs" / "latest_checkpointed_iteration.txt").write_text("5")
    settings = {"dim": RANK, "alpha": ALPHA} | ({"target_modules": targets} if targets else {}) | settings
    output = on_ranks(
        python, ranks, "save", folder / "run", flags=flags_at(folder / "mcore", parallel), base=str(folder / "mcore"),
        kind=kind, settings=settings, directory=str(iteration), tokens=tokens().tolist(),
    )  # fmt: skip
    return folder / "theirs", output, settings


@pytest.mark.parametrize(
    ("variant", "kind", "targets", "parallel", "ranks", "again", "ranks_again"), CASES,
    ids=lambda value: str(value).replace("-model-parallel-size", "") if isinstance(value, str) else "",
)  # fmt: skip
def test_an_adapter_of_megatron_bridge_gives_its_logits_in_peft_and_comes_back(
    variant, kind, targets, parallel, ranks, again, ranks_again, trainers, checkpoint, tmp_path
):
    source = checkpoint(variant)
    hf_to_mcore(source, tmp_path / "mcore", transformer_impl="local")
    theirs, output, settings = saved(trainers, source, tmp_path, kind, targets, parallel, ranks)
    tp = int(parallel.split(TP)[1].split()[0]) if TP in parallel else 1
    lora_to_peft(theirs, tmp_path / "peft", hf_config=source, alpha=ALPHA, tp=tp)
    assert check(tmp_path / "peft").ok

    def model_with(adapter: Path):
        return (
            merged(source, adapter, tmp_path / f"{adapter.name}-sum")
            if variant in ("deepseek-v3", "qwen3-moe-mixed")
            else with_peft(source, adapter)
        )

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    assert distance(output, base) > 0.1, "an adapter that does nothing would hide errors"
    assert distance(output, model_with(tmp_path / "peft")) < TOLERANCE
    for name, fault in faults(load_file(tmp_path / "peft" / "adapter_model.safetensors")).items():
        assert (
            distance(output, model_with(changed(tmp_path / "peft", tmp_path / name, fault))) > 100 * TOLERANCE
        )

    # back, at another layout, for the same modules
    tp = int(again.split(TP)[1].split()[0]) if TP in again else 1
    lora_to_megatron(tmp_path / "peft", tmp_path / "back", tp=tp)
    assert diff(tmp_path / "back", tmp_path / "peft", hf_config=source).equal
    assert check(tmp_path / "back").ok
    loaded = on_ranks(
        trainers,
        ranks_again,
        "load",
        tmp_path / "again",
        flags=flags_at(tmp_path / "mcore", again),
        base=str(tmp_path / "mcore"),
        kind=kind,
        settings=settings,
        directory=str(tmp_path / "back" / "iter_0000000"),
        tokens=tokens().tolist(),
    )
    assert float((loaded[..., :1000] - output[..., :1000]).abs().max()) < TOLERANCE
    lora_to_peft(tmp_path / "back", tmp_path / "peft-again", hf_config=source)
    first, second = (d / "adapter_model.safetensors" for d in (tmp_path / "peft", tmp_path / "peft-again"))
    assert first.read_bytes() == second.read_bytes()


LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SERVED = [name for name in LATENT if name != "linear_kv_up_proj"]  # of which vLLM makes other matrices
OF_MCORE_BRIDGE = [
    ("qwen3", LINEAR, f"{TP} 2", 2, f"{PP} 2", 2),
    ("llama", ["linear_qkv", "linear_fc1"], f"{TP} 2 {PP} 2", 4, f"{TP} 2", 2),
    ("deepseek-v3", LATENT, f"{TP} 2 {EP} 2 {ETP} 1", 2, f"{PP} 2", 2),
    ("qwen3-moe", LINEAR, f"{PP} 2 {EP} 2 {ETP} 1", 4, f"{TP} 2 {ETP} 1", 2),
]


@pytest.mark.parametrize(
    ("variant", "targets", "parallel", "ranks", "again", "ranks_again"), OF_MCORE_BRIDGE,
    ids=lambda value: str(value).replace("-model-parallel-size", "") if isinstance(value, str) else "",
)  # fmt: skip
def test_an_adapter_of_mcore_bridge_makes_the_sum_that_it_makes(
    variant, targets, parallel, ranks, again, ranks_again, trainers, checkpoint, tmp_path
):
    """Bit for bit: mcore-bridge's own `merge` on the ranks, against the adapter as PEFT's files and merged here."""
    source = checkpoint(variant)
    hf_to_mcore(source, tmp_path / "mcore")
    settings = {"r": RANK, "lora_alpha": ALPHA}

    def run(action: str, layout: str, ranks: int, directory: Path) -> dict[str, torch.Tensor]:
        """The published tensors of the sum that mcore-bridge makes."""
        sums = tmp_path / f"{action}-sums" / "iter_0000005"
        for folder in (sums, directory):
            folder.mkdir(parents=True, exist_ok=True)
        on_ranks(
            trainers,
            ranks,
            "mcore_bridge",
            tmp_path / f"run-{action}",
            saves=action == "save",
            flags=flags_at(tmp_path / "mcore", layout),
            base=str(tmp_path / "mcore" / "release"),
            targets=targets,
            settings=settings,
            directory=str(directory),
            merged=str(sums),
        )
        mcore_to_hf(sums, tmp_path / f"{action}-hf", hf_config=source)
        return hf_tensors(tmp_path / f"{action}-hf")

    theirs = run("save", parallel, ranks, tmp_path / "theirs" / "iter_0000005")
    tp, tp_again = (int(text.split(TP)[1].split()[0]) if TP in text else 1 for text in (parallel, again))
    lora_to_peft(
        tmp_path / "theirs" / "iter_0000005", tmp_path / "peft", hf_config=source, alpha=ALPHA, tp=tp
    )
    lora_merge(source, tmp_path / "peft", tmp_path / "ours")
    assert same(theirs, hf_tensors(tmp_path / "ours")) == []
    changed_tensors = same(theirs, hf_tensors(source))
    assert len(changed_tensors) == sum(
        ".lora_A." in n for n in load_file(tmp_path / "peft" / "adapter_model.safetensors")
    )
    for name, fault in faults(load_file(tmp_path / "peft" / "adapter_model.safetensors")).items():
        wrong = changed(tmp_path / "peft", tmp_path / name, fault)
        lora_merge(source, wrong, tmp_path / f"{name}-sum")
        assert same(theirs, hf_tensors(tmp_path / f"{name}-sum")) != []

    lora_to_megatron(tmp_path / "peft", tmp_path / "back", format="mcore-bridge", tp=tp_again)
    assert check(tmp_path / "back").ok and diff(tmp_path / "back", tmp_path / "peft").equal
    assert same(theirs, run("load", again, ranks_again, tmp_path / "back" / "iter_0000000")) == []


MODES = {
    "shared by all experts": {"share_expert_adapters": True},
    "one for each expert": {"share_expert_adapters": False},
    "shared, as before": {"share_expert_adapters": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_adapters_of_grouped_experts_become_each_experts(mode, trainers, checkpoint, tmp_path):
    """The matrices of every expert bit for bit, as torch's own reader finds them in what Megatron-Bridge saves."""
    source = checkpoint("qwen3-moe")
    hf_to_mcore(source, tmp_path / "mcore")
    settings = {"dim": RANK, "alpha": ALPHA, "target_modules": ["linear_fc1", "linear_fc2"]} | MODES[mode]

    def run(saves: bool, layout: str, ranks: int, directory: Path, **others) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        on_ranks(
            trainers,
            ranks,
            "grouped",
            tmp_path / f"run-{saves}",
            saves=saves,
            flags=flags_at(tmp_path / "mcore", layout),
            base=str(tmp_path / "mcore" / "release"),
            settings=settings | others,
            directory=str(directory),
            legacy=saves and mode == "shared, as before",
        )

    theirs = tmp_path / "theirs" / "iter_0000005"
    before = mode == "shared, as before"  # which they cannot save with experts on several ranks
    run(True, f"{PP} 2" if before else f"{PP} 2 {EP} 2 {ETP} 1", 2 if before else 4, theirs)
    (theirs / "run_config.yaml").write_text(f"model:\n  share: 1\npeft:\n  alpha: {ALPHA}\n  dim: {RANK}\n")
    lora_to_peft(theirs, tmp_path / "peft", hf_config=source)
    pairs, stored = load_file(tmp_path / "peft" / "adapter_model.safetensors"), read_by_torch(theirs)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_alpha"] == ALPHA
    wanted = {}
    for layer in range(4):
        for expert in range(8):
            named = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"

            def matrix(name: str, layer: int = layer, expert: int = expert) -> torch.Tensor:
                held = stored[f"decoder.layers.mlp.experts.experts.{name}.weight"][layer]
                return held[expert] if held.dim() == 3 else held

            for fused, names in (("linear_fc1", ("gate_proj", "up_proj")), ("linear_fc2", ("down_proj",))):
                rows = matrix(f"{fused}.adapter.linear_out").chunk(len(names))
                for name, part in zip(names, rows, strict=True):
                    wanted[f"{named}.{name}.lora_A.weight"] = matrix(f"{fused}.adapter.linear_in")
                    wanted[f"{named}.{name}.lora_B.weight"] = part
    assert same(wanted, pairs) == []
    numbers_of = {
        n: t
        for n, t in pairs.items()
        if ".0.mlp.experts.0.down_proj" in n or ".0.mlp.experts.1.down_proj" in n
    }
    alike = [torch.equal(*[t for n, t in numbers_of.items() if f"lora_{matrix}" in n]) for matrix in "AB"]
    assert alike == [mode != "one for each expert"] * 2
    lora_to_megatron(tmp_path / "peft", tmp_path / "back")
    run(False, f"{TP} 2 {EP} 4 {ETP} 1", 4, tmp_path / "back" / "iter_0000000", share_expert_adapters=False)
    assert diff(tmp_path / "back", tmp_path / "peft").equal


def read_by_torch(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(str(directory))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries.items() if hasattr(e, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


# Variant, whose adapters, the trainer's layout on how many ranks, vLLM's options on as many, and which
# faults are tried.
IN_MEMORY = [
    (
        "qwen3",
        "bridge",
        f"{TP} 2",
        {"tp": 2},
        2,
        ["exchanged", "stale", "doubled", "alpha", "disabled", "taken"],
    ),
    ("qwen3", "mcore-bridge", f"{PP} 2", {"tp": 2, "fully_sharded_loras": True}, 2, []),
    ("qwen3-moe", "bridge", f"{TP} 2 {EP} 2 {ETP} 1", {"tp": 2, "enable_expert_parallel": True}, 2, []),
    ("qwen3", "canonical", f"{TP} 2", {"tp": 2, "quantization": "fp8_per_block", "backend": "staged"}, 2, []),
    ("qwen3-moe", "grouped", f"{EP} 2 {ETP} 1", {"tp": 2, "packed": True}, 2, ["apart"]),
    ("qwen3-moe", "peft", "", {"tp": 2}, 2, []),
    ("qwen3-moe", "shared", f"{EP} 2 {ETP} 1", {"tp": 2, "fully_sharded_loras": True}, 2, []),
    ("deepseek-v3", "bridge", f"{EP} 2 {ETP} 1", {"tp": 2}, 2, ["absorbed"]),
]
NAMED = {
    "absorbed": (
        "vLLM multiplies by matrices that it makes of model.layers.1.self_attn.kv_b_proj.weight without its "
        "adapter"
    ),
    "exchanged": "layers.1.self_attn.k_proj.lora_B.weight, base_model.model.model.layers.1.self_attn.v_proj.lora_B",
    "taken": "another connection refits an adapter of other layers",
    "stale": "layers.0.self_attn.q_proj.lora_A",
    "doubled": "layers.3.mlp.down_proj.lora_B",
    "alpha": "multiplies by 5 now, and by 2.5 when it was connected",
    "disabled": "is disabled: a refit would make plain W + scale * B @ A of it",
    "apart": "gate and up have different A in 1 layers (model.layers.0.mlp.experts), for which this vLLM has one",
}


@pytest.mark.parametrize(
    ("variant", "kind", "parallel", "engine", "ranks", "faults"),
    IN_MEMORY,
    ids=lambda v: v if isinstance(v, str) and " " not in v else "",
)
def test_a_refit_leaves_in_vllms_slots_what_vllm_loads_of_the_adapters_files(
    variant, kind, parallel, engine, ranks, faults, trainers, weights, tmp_path
):
    """The adapter is in a trainer's modules, in DDP and in fp32; vLLM holds it in bf16, times its scale."""
    folder, engine = weights(variant), dict(engine)
    base, backend = folder / "mcore", engine.pop("backend", "auto")
    if kind in ("grouped", "shared"):  # whose states only layers of Transformer Engine have
        hf_to_mcore(folder / "hf", base := tmp_path / "mcore")
    rank = 8 if kind == "mcore-bridge" else RANK  # fully sharded, on both ranks or on the first alone
    outcome = on_ranks(
        trainers,
        ranks,
        "refitted",
        tmp_path / "run",
        module="tests.on_cpu.lora_live_on_cpu",
        kind=kind,
        flags=flags_at(base, parallel),
        base=str(base),
        hf=str(folder / "hf"),
        settings={
            "dim": rank,
            "alpha": ALPHA,
            "target_modules": SERVED if variant == "deepseek-v3" else LINEAR,
        },
        options={"max_loras": 3, "max_lora_rank": 8} | engine,
        files=str(tmp_path),
        faults=faults,
        backend=backend,
    )
    filled, exchanged = 4 * 2 * (6 if "packed" in engine else 7) + 2 * (kind == "peft"), r"qkv_proj\.lora_b"
    if variant == "deepseek-v3":  # one dense layer, and shared experts in the others
        filled, exchanged = 2 * (4 * 4 + 3 + 3 * 6), r"gate_up_proj\.lora_b|experts\.w13_lora_b"
    assert outcome["different"] == [[], []] and outcome["filled"] == filled
    assert outcome["control"] and all(re.search(exchanged, name) for name in outcome["control"])
    assert "dummy weights" in outcome["before"]
    first, second = outcome["names"]
    assert first.startswith("policy@1-") and second.startswith("policy@2-") and outcome["version"] == 2
    assert outcome["again"] == 1, "the weights below go once"
    assert outcome["moved"][:2] == [[1, 1], True], "they go again when the trainer has others, and once"
    assert bool(outcome["moved"][2]) == (variant == "deepseek-v3"), "routers' biases, which are buffers"
    assert outcome["overwritten"] == [(False, 0), (True, 1), (True, 1)], (
        "seen by a verification, and sent once"
    )
    for name, (said, served) in outcome["faults"].items():
        assert NAMED[name] in said and served.startswith("policy@8-"), "the version before serves on"


def test_an_adapter_of_some_layers_in_peft_is_loaded_by_megatron_bridge(trainers, checkpoint, tmp_path):
    """What has none gets zeros, since Megatron-Bridge 0.6.2 cannot save queries and values alone."""
    source = checkpoint("qwen3")
    hf_to_mcore(source, tmp_path / "mcore", transformer_impl="local")
    of = adapter(
        source,
        tmp_path / "adapter",
        shared=False,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=[1, 2],
    )
    report = lora_to_megatron(of, tmp_path / "lora", hf_config=source)
    assert any("2 layers without an adapter get zeros" in notice for notice in report.notices)
    loaded = on_ranks(
        trainers,
        2,
        "load",
        tmp_path / "run",
        flags=flags_at(tmp_path / "mcore", f"{TP} 2"),
        base=str(tmp_path / "mcore"),
        kind="canonical",
        settings={"dim": 4, "alpha": 10, "target_modules": CANONICAL[:3]},
        directory=str(tmp_path / "lora" / "iter_0000000"),
        tokens=tokens().tolist(),
    )
    assert distance(loaded, with_peft(source, of)) < TOLERANCE
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    assert distance(loaded, base) > 0.1


def faults(tensors) -> dict:
    """Changes of PEFT's files that a conversion could make by mistake."""

    def exchanged(pairs, _) -> None:
        for name in [name for name in pairs if name.endswith("k_proj.lora_B.weight")]:
            other = name.replace("k_proj", "v_proj")
            pairs[name], pairs[other] = pairs[other].clone(), pairs[name].clone()

    def doubled(_, config) -> None:
        config["lora_alpha"] *= 2

    def one_left_out(pairs, _) -> None:
        for name in [name for name in pairs if ".layers.2.mlp.experts.3." in name and "lora_B" in name]:
            pairs[name] = torch.zeros_like(pairs[name])

    changes = {"doubled": doubled}
    if any("v_proj.lora_B" in name for name in tensors) and any("k_proj.lora_B" in name for name in tensors):
        changes["exchanged"] = exchanged
    if any(".experts.3." in name for name in tensors):
        changes["left-out"] = one_left_out
    return changes
