"""A real SGLang server that has the changes of a refit beside what it serves, and switches to them."""

from pathlib import Path

import pytest

from tests import install_sglang_cpu
from tests.digests.on_disk import expected
from tests.megatron.test_logits import flags_at
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.switched_tokens import models_of, switch_within


@pytest.mark.parametrize("stages", [1, 2])
def test_a_server_serves_the_old_weights_until_it_switches(stages, converted):
    checkpoints = converted("qwen3")
    old, new = (expected(Path(hf), dtype="fp32")[0] for hf, _ in checkpoints)
    [said] = run_on_ranks(
        1, "switching", flags_at(Path(checkpoints[0][1]), ""), checkpoints, stages,
        module="switching_sglang_on_cpu", python=warm.python_of_sglang(),
        environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    assert said["whole"] == [[False, old, "0"], 0]
    assert said["pending"] == [True, old, "0"] and said["while pending"] == said["loaded"]
    if stages > 1:
        assert "it has pipeline stages; the next send brings all" in said["stages"]
        return
    assert said["abort"] == [1, new, "1"] and said["after"] != said["loaded"], "without what it had cached"
    assert "SGLang drops its requests when it is paused" in said["finish"] and said["still"] == [new, "1"]
    assert said["begun again"][1:] == [old, "3"], "2 was begun, and nobody has it"
    (sentence, _, ran_on, tokens), *held = said["under requests"]
    assert sentence == "no error" and ran_on and len(tokens) == 200, "no request is lost"
    before, after = models_of(hf for hf, _ in checkpoints)
    assert 1 < switch_within(before, after, said["fresh"], tokens, anew=False) < 100, (
        "its tokens are of both versions"
    )
    assert held == [new, "4"]
    version, late, told, (before, lender, newcomer) = said["from another"]
    assert (version, late, told) == (9, 9, ["9", "9"]) and lender == newcomer != before, (
        "a server that came between two sends has got the other one's weights"
    )
