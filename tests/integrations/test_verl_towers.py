"""GRPO of a model whose vision tower is trained, by the real verl: its worker, engine of FSDP2, losses and checkpoints,
in an environment of their own with the transformers that verl asks for. After each sync a real vLLM answers about
images as one that has loaded what verl saves."""

import json

import pytest

from tests.integrations.test_verl import ALL_LINES
from tests.starting import fork_server, warm
from tests.tools.clones import RAY_PACKAGES, STANDINS, variables
from tests.tools.environments import run
from tests.tools.images import make_served

pytestmark = pytest.mark.install
# verl changes how transformers' classes with towers compute, which it can in these versions.
PACKAGES = [*RAY_PACKAGES, "transformers!=5.6.0,<5.11,>=5.5.3", "tokenizers<=0.23.0", "huggingface-hub<2"]
REF = "actor_rollout_ref"
LINES = [
    *ALL_LINES[1:],
    "model_engine=dp",
    f"+{REF}.rollout.engine_kwargs.vllm.worker_extension_cls=reshard.integrations.verl.VerlExtension",
    f"+{REF}.model.override_config.attn_implementation=eager",
    f"+{REF}.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    *(f"{REF}.{line}" for line in (
        "actor.strategy=fsdp2", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.optim.lr=1e-3", "actor.use_torch_compile=false", "actor.checkpoint.save_contents=[hf_model]",
        "model.use_remove_padding=false", "rollout.name=vllm", "rollout.n=4", "rollout.tensor_model_parallel_size=1",
        "rollout.free_cache_engine=false", "rollout.log_prob_micro_batch_size_per_gpu=4",
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    at = tmp_path_factory.mktemp("at")
    hf = make_served(tmp_path_factory.mktemp("model") / "hf", "Qwen3VLForConditionalGeneration")
    python = fork_server.python(*warm.WITH_RAY, environment=variables(STANDINS), packages=PACKAGES)
    out = run([python, "-m", "tests.on_cpu.verl_vlm_on_cpu", hf, *LINES], env=variables(STANDINS), cwd=at)
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


def test_after_each_step_of_verls_grpo_vllm_answers_about_images_as_one_that_has_loaded_what_verl_saves(
    outcome,
):
    assert outcome["made"] == [
        "reshard.integrations.verl.plugin.ReshardFsdpEngine",
        "reshard.integrations.verl.vllm.ReshardServerAdapter",
    ]
    assert outcome["syncs"] == [["no error", ""]] * 3
    *loaded, with_first_tower = outcome["loaded"]
    assert outcome["served"] == loaded and len(loaded) == 3, "to the last bit"
    assert all(a != b for a, b in zip(loaded[0], loaded[-1], strict=True)), "the control: other weights"
    assert all(a != b for a, b in zip(with_first_tower, loaded[-1], strict=True)), (
        "the control: another tower"
    )


def test_verl_trains_the_tower_and_its_rollouts_are_the_policys(outcome):
    assert outcome["untrained"] == []
    assert len(outcome["furthest"]) == 2 and max(outcome["furthest"]) < 1e-4
