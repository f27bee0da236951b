"""A real vLLM on the CPU that is asked about images, while its model is trained with the vision tower: after each sync
it serves what a vLLM serves that has loaded what the trainer saves."""

import pytest

from tests.engines.test_engine import run
from tests.starting.ranks import free_port
from tests.tools.images import make_served

STEPS = 3
# Of a language model that a table covers and of one that none does; and how far what a vLLM in its dtype says is from
# what the policy says in fp32.
TRAINED = {
    "Qwen3VLForConditionalGeneration": ("float32", 1e-5),
    "Qwen2_5_VLForConditionalGeneration": ("bfloat16", 0.05),
}


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    hf = make_served(folder / "hf", request.param)
    dtype, near = TRAINED[request.param]
    return run(folder, 2, "vlm_on_cpu.grpo", str(hf), str(folder), STEPS, {"dtype": dtype}), near


def test_after_each_step_of_grpo_a_vllm_answers_about_images_as_one_that_has_loaded_the_model(trained):
    outcome, near = trained
    assert outcome["served"] == outcome["loaded"] and len(outcome["served"]) == STEPS
    first, *_, last = outcome["served"]
    assert all(a != b for a, b in zip(first, last, strict=True)), "the control: other weights"
    assert outcome["untrained"] == [], "tower and language model are trained"
    assert outcome["without its tower"] != last, "the control: the language model alone is synced"
    assert len(outcome["furthest"]) == STEPS - 1 and max(outcome["furthest"]) < near, (
        "rollouts are the policy's"
    )


def test_what_vllm_has_kept_of_an_image_is_not_served_after_a_sync(trained):
    outcome, _ = trained
    kept, last = outcome["with what it has kept"], outcome["served"][-1]
    assert all(a != b for a, b in zip(kept, last, strict=True)), "the control: the gate looks away"


def test_nor_where_vllms_workers_are_in_other_processes(tmp_path):
    hf = make_served(tmp_path / "hf", "Qwen3VLForConditionalGeneration")
    outcome = run(tmp_path, 1, "vlm_on_cpu.apart", str(hf), free_port())
    assert max(far for far, _ in outcome) < 1e-5
    assert outcome[1][1] > 0.01, "the control: another tower says something else of the same images"
