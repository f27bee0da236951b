"""A fleet whose engines serve quantized weights: a newcomer gets them from another one, between two sends."""

import pytest
import torch

from tests.engines.test_engine import run
from tests.tools.vllm_server import two_checkpoints

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="vLLM's build for the CPU has int8 experts where that knows bf16 in AVX512",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twins")
    return run(folder, 1, "fleet_twins_on_cpu.twins", two_checkpoints(folder, "served-int8"))


def test_a_real_vllm_gets_every_bit_of_quantized_experts_from_another_and_answers_alike(outcome):
    assert outcome["got"] == outcome["lent"] == outcome["still lent"], "equal to the last bit"
    before, got = outcome["before"][0], outcome["got"]["held"][0]
    assert before.keys() == got.keys()
    changed = [name for name, bits in got.items() if before[name] != bits]
    assert sum("w13_weight" in name or "w2_weight" in name for name in changed) >= 8, "codes and scales"
    said, _, serves, _ = outcome["said"]
    assert (said["version"], said["why"], serves) == (0, None, 0)


def test_one_that_serves_in_another_form_gets_nothing_hears_why_and_waits_for_the_next_send(outcome):
    _, said, _, serves = outcome["said"]
    assert said["version"] is None and serves is None
    assert (
        "could not hand on version 0 to it: " in said["why"]
        and "serves weights in a form of its own" in said["why"]
    )
    assert "experts is UnquantizedFusedMoEMethod by CPU here, and Int8" in said["why"]
    assert outcome["sent"] == [1, ["one", "two", "three"], {}]


def test_the_next_send_refits_the_newcomer_as_the_others(outcome):
    one, two = outcome["refitted"]
    assert one == two and one["answers"] != outcome["got"]["answers"]
