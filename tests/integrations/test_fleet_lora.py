"""A fleet whose engines serve a trainer's adapter: a newcomer gets it from another one, with the weights below it."""

import pytest

from tests.engines.test_engine import run
from tests.tools.checkpoints import make
from tests.tools.vllm_server import with_tokenizer


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet_lora")
    hf = folder / "hf"
    make(hf, "served-qwen3", seed=0)
    with_tokenizer(hf)
    return run(folder, 1, "fleet_lora_on_cpu.adapters", str(hf), str(folder))


def test_a_newcomer_gets_the_adapter_and_the_weights_below_it_bit_for_bit_from_another_engine(outcome):
    assert outcome["got"] == outcome["lent"]
    assert outcome["got"]["serves"] == [7, None]
    assert outcome["named"] == dict.fromkeys(("one", "two", "three"), "known"), "whatever path is given"
    assert outcome["got"]["policy"] == outcome["got"]["files"], "what vLLM loads itself of PEFT's files"
    assert outcome["got"]["policy"] != outcome["got"]["model"], "the adapter does something"
    assert all(isinstance(one, list) for one in outcome["got"]["policy"])


def test_before_it_has_them_it_refuses_requests_by_the_names_of_the_adapter_and_of_the_model(outcome):
    policy, model, named, serves = outcome["early"]
    assert policy.startswith("404: ") and "policy" in policy
    assert "dummy weights" in model
    assert named != "known" and serves is None


def test_the_next_send_refits_the_newcomer_as_the_others(outcome):
    assert outcome["sent"] == [8, ["one", "two"], {}]
    one, two = outcome["refitted"]
    assert one == two and one["policy"] == one["files"] != outcome["got"]["policy"]
    assert one["model"] == outcome["got"]["model"]


def test_before_a_trainer_that_starts_again_sends_a_newcomer_has_the_adapter_that_others_serve(outcome):
    assert outcome["found"] == 8
    assert outcome["again"] == outcome["refitted"][0] and outcome["again"]["serves"] == [8, None]
    assert outcome["sent again"] == [9, ["one", "three", "two"], {}]
    one, two, three = outcome["refitted again"]
    assert one == two == three and one["policy"] == one["files"] != outcome["again"]["policy"]
