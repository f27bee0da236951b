"""Why two systems differ: each cause is planted alone and found with its share, and two at once with theirs."""

import json
import shutil

import numpy as np
import pytest
import torch

from reshard import MegatronLayout, hf_to_mcore
from reshard.core.errors import ReshardError
from reshard.parity.causes.replay import replayed
from reshard.parity.routing import Choices
from reshard.parity.systems.base import ForwardSystem, ScoringOptions
from reshard.parity.systems.huggingface import HuggingFace
from tests.starting.ranks import run_on_ranks
from tests.tools import trained_moe
from tests.tools.parity_runs import change_config, ranks_of, with_a_fault

MATRIX = "model.layers.5.self_attn.o_proj.weight"
PROMPTS = {"prompts": 4, "lengths": (24, 48)}


@pytest.fixture(scope="module")
def faulty(trained, tmp_path_factory):
    """A trained model, its Megatron checkpoint, and the model with faults, by their names."""
    folder = tmp_path_factory.mktemp("causes")
    hf_to_mcore(trained, folder / "mcore", MegatronLayout(), transformer_impl="local")
    with_a_fault(trained, folder / "weights", MATRIX, 1.25)
    for name, source in (("config", trained), ("both", folder / "weights")):
        shutil.copytree(source, folder / name)
        rope = json.loads((folder / name / "config.json").read_text())["rope_parameters"]
        change_config(folder / name, rope_parameters=rope | {"rope_theta": rope["rope_theta"] * 4})
    return {name: folder / name for name in ("mcore", "weights", "config", "both")} | {"hf": trained}


def why(a, b, fault="", layout=None, **options):
    options = {"dtype": "fp32"} | PROMPTS | options
    ranks = ranks_of(layout or {})
    results = run_on_ranks(ranks, "why", str(a), str(b), options, fault, layout, module="parity_on_cpu")
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize(
    ("a", "b", "cause", "detail"),
    [
        ("hf", "weights", "weights", MATRIX),
        ("mcore", "weights", "weights", MATRIX),
        ("weights", "mcore", "weights", MATRIX),
        ("hf", "config", "config", "rope_theta"),
        ("mcore", "config", "config", "rope_theta"),
    ],
)
def test_a_planted_difference_of_checkpoints_is_all_of_the_difference(a, b, cause, detail, faulty):
    shares, causes, text = why(faulty[a], faulty[b])
    assert 0.999 < shares[cause] < 1.001 and abs(shares["unexplained"]) < 1e-3, text
    assert detail in causes["causes"][0]["detail"] and causes["not_measured"] == [], text


def test_two_causes_at_once_get_their_parts(faulty):
    shares, _, text = why(faulty["hf"], faulty["both"])
    assert set(shares) == {"config", "weights", "unexplained"} and abs(shares["unexplained"]) < 1e-6, text
    assert min(shares["config"], shares["weights"]) > 0.1, text
    rounded, _, text = why(faulty["mcore"], faulty["weights"], dtype="bf16")
    exact = why(faulty["mcore"], faulty["weights"])[1]["mean_abs"]
    assert rounded["weights"] > 0.5 and 0.01 < rounded["rounding"] < 0.5 and exact > 0, text


def test_rounding_alone_is_called_rounding(faulty):
    shares, _, text = why(faulty["hf"], faulty["mcore"], dtype="bf16")
    assert shares["rounding"] > 0.99 and abs(shares["unexplained"]) < 0.01, text
    assert "A in bf16" in text and "B in bf16" in text and set(shares) == {"rounding", "unexplained"}


def test_batches_and_code_of_a_running_system_are_told_apart(faulty):
    shares, _, text = why(faulty["hf"], faulty["hf"], "batching", batch_size=2, lengths=(24,))
    assert shares["batching"] > 0.999 and abs(shares["unexplained"]) < 1e-3, text
    shares, causes, text = why(faulty["hf"], faulty["hf"], "code")
    assert shares["unexplained"] > 0.999 and "were not exchanged" in causes["not_measured"][0], text


def test_code_that_turns_far_tokens_otherwise_is_one_of_positions(faulty):
    shares, _, text = why(faulty["hf"], faulty["hf"], "angles")
    assert shares == {"positions": pytest.approx(1), "unexplained": pytest.approx(0, abs=1e-6)}, text
    shares, _, text = why(faulty["hf"], faulty["hf"], "angles and code")
    alone = [why(faulty["hf"], faulty["hf"], fault)[1]["mean_abs"] for fault in ("angles", "code")]
    expected = alone[0] / sum(alone)
    assert abs(shares["positions"] - expected) < 0.25 and shares["unexplained"] > 0.1, (alone, text)


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_tokens_that_go_to_other_experts_are_the_whole_difference(variant, checkpoint):
    hf = checkpoint(variant)
    shares, causes, text = why(hf, hf, "routing", noise=False)
    assert causes["mean_abs"] > 1e-6 and 0.999 < shares["routing"] < 1.001, text
    assert abs(shares["unexplained"]) < 1e-3, "with the same experts the two are the same"


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}], ids=str)
def test_megatron_takes_the_experts_of_transformers_and_its_weights(layout, checkpoint, tmp_path):
    hf = checkpoint("qwen3-moe")
    hf_to_mcore(hf, tmp_path / "mcore", MegatronLayout(**layout), transformer_impl="local")
    shares, _, text = why(tmp_path / "mcore", hf, "routing", layout)
    assert 0.99 < shares["routing"] < 1.01 and abs(shares["unexplained"]) < 0.01, text
    if layout:
        name = "model.layers.1.self_attn.o_proj.weight"
        other = with_a_fault(hf, tmp_path / "other", name, 1.25)
        shares, causes, text = why(tmp_path / "mcore", other, layout=layout)
        assert 0.99 < shares["weights"] < 1.01 and name in causes["causes"][0]["detail"], text


def test_a_trained_mixture_of_experts_has_the_causes_that_were_planted(tmp_path_factory):
    hf = trained_moe.make(tmp_path_factory.mktemp("trained-moe"), steps=200, batch=8, length=64)
    prompts = trained_moe.prompts(4, 48)
    system = HuggingFace(hf, "fp32")
    [scores] = system.score(prompts[:1], ScoringOptions(routing=True))
    chances = torch.from_numpy(scores.choices.scores).softmax(-1).max(-1).values
    assert chances.mean() > 0.3, "a router at random gives its best expert little more than an eighth"
    options = {"prompts": prompts, "lengths": ()}
    shares, _, text = why(hf, hf, "routing", **options)
    assert 0.999 < shares["routing"] < 1.001, text
    shares, _, text = why(hf, hf, "routing and batching", batch_size=2, **options)
    assert min(shares["routing"], shares["batching"]) > 0.05 and abs(shares["unexplained"]) < 1e-3, text
    spoiled = with_a_fault(
        hf, tmp_path_factory.mktemp("spoiled") / "hf", "model.layers.2.mlp.gate.weight", 1.05
    )
    shares, _, text = why(hf, spoiled, dtype="bf16", **options)
    assert 0.999 < shares["weights"] < 1.001, f"both round alike, since they run the same code: {text}"


class Sorting(ForwardSystem):
    """A system whose router does not choose by ``topk``."""

    def __init__(self) -> None:
        self.router = torch.nn.Identity()

    def routers(self):
        return {3: self.router}

    def _unused(self, *_):
        raise AssertionError

    logits = roots = choices = close = _unused


def test_experts_that_cannot_be_replayed_are_refused():
    system, choices = Sorting(), Choices((3,), np.zeros((2, 1, 1), np.int64), None)
    with (
        pytest.raises(ReshardError, match=r"the routers of layers 3 do not choose by torch\.topk"),
        replayed(system, choices),
    ):
        system.router(torch.zeros(3, 4))
