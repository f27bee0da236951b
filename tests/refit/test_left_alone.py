"""What a refit leaves alone is as it was loaded or last written, also after an engine has lost its weights; or the
refit is refused, before anything is changed."""

from pathlib import Path

import pytest

from tests import install_sglang_cpu
from tests.engines.test_sleeping import without_mtp
from tests.megatron.test_logits import flags_at
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.model_classes import make

MODULE = "refit_left_alone_on_cpu"
FINE, LOADED, TRAINED = "no error", "as loaded", "as trained"
NOT_WHOLE = "are not whole, since"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of a model with a tower."""
    folder = tmp_path_factory.mktemp("towers")
    return [str(make(folder / str(seed), "Qwen3VLForConditionalGeneration", seed)) for seed in (0, 1)]


def sides(folder: Path) -> dict:
    return {"trainer": 1, "engine": 1, "together": True, "folder": str(folder)}


def check(outcomes: list, *expected: str) -> None:
    """Each refit leaves the tower so, and the engine serves; or it is refused with this, and the engine does not."""
    assert len(outcomes) == len(expected)
    for (said, is_ready, held), outcome in zip(outcomes, expected, strict=True):
        if outcome in (LOADED, TRAINED):
            assert (said, is_ready, held) == (FINE, True, outcome)
        else:
            assert outcome in said and not is_ready, said


def test_a_tower_that_a_vllm_may_have_lost_is_restored_or_refused(checkpoints, tmp_path):
    [of] = run_on_ranks(1, "vllm_towers", sides(tmp_path), checkpoints, module=MODULE)
    lost = f"{NOT_WHOLE} they were lost in sleep, and the trainer does not bring them: refit them"
    check(of["slept before it was connected"], lost, LOADED, LOADED)
    check(of["level 1"], LOADED, LOADED, LOADED)
    check(of["level 2"], LOADED, LOADED, LOADED)
    check(of["another brought it"], LOADED, TRAINED, lost, TRAINED, TRAINED, TRAINED, TRAINED)
    (said, _), refused, mended = of["a refit of it failed"]
    assert "on purpose" in said
    assert f"{NOT_WHOLE} a refit of them failed" in refused[0] and not refused[1]
    check([mended], TRAINED)
    check(of["others wrote it"], LOADED, lost, TRAINED, TRAINED)
    perhaps = "they may have been lost in sleep before reshard was connected"
    check(of["nobody watched"], perhaps)
    check(of["slept"], perhaps)
    check(of["never slept"], perhaps if of["has discard"] else LOADED)
    refused, beside = of["beside"]
    assert "o_proj" in refused and beside == FINE


def test_a_connection_that_one_rank_refuses_leaves_others_as_they_were(checkpoints, tmp_path):
    places = sides(tmp_path) | {"trainer": 2, "engine": 2}
    for refused, said in run_on_ranks(2, "refused_by_one", places, checkpoints, module=MODULE):
        assert "on purpose" in refused and said == FINE


if install_sglang_cpu.installed():

    def test_a_tower_that_an_sglang_has_released_is_restored_or_refused(checkpoints, tmp_path):
        [of] = run_on_ranks(
            1,
            "sglang_towers",
            sides(tmp_path),
            checkpoints,
            module=MODULE,
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        lost = f"{NOT_WHOLE} they were lost in sleep"
        check(of["saved"], LOADED, LOADED, TRAINED, TRAINED, TRAINED, LOADED)
        check(of["not saved"], LOADED, lost, TRAINED, TRAINED, lost, lost)
        check(of["released before"], "they may have been lost in sleep before reshard was connected", LOADED)


def test_mtp_layers_that_were_lost_are_not_served(converted):
    checkpoints = converted("deepseek-v3", mtp=True)
    flags = without_mtp(flags_at(Path(checkpoints[1][1]), ""))
    [of] = run_on_ranks(1, "mtp_lost", flags, checkpoints[1], module="sleeping_on_cpu")
    (said, before, why, wrong), after = of["before"], of["after"]
    assert "drafter is not whole, since it was lost in sleep, and the trainer has no drafter" in said
    assert not before and "a drafter that is not whole" in why and len(wrong) >= 17
    assert after == (FINE, True, "", [])
