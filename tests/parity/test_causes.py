"""Why two systems differ: each cause is planted alone and found with its share, and two at once with theirs."""

import json
import shutil

import numpy as np
import pytest
import torch

from reshard import MegatronLayout, hf_to_mcore
from reshard.core.errors import ReshardError
from reshard.parity.causes.indexers import AttendedTokens
from reshard.parity.causes.replay import replayed
from reshard.parity.routing import Choices
from reshard.parity.systems.base import ForwardSystem, ScoringOptions
from reshard.parity.systems.huggingface import HuggingFace
from tests.starting.ranks import run_on_ranks
from tests.tools import trained_moe
from tests.tools.checkpoints import with_config
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


@pytest.mark.parametrize("variant", ["deepseek-v32", "glm-moe-dsa-shared"])
def test_tokens_that_attend_to_others_are_the_whole_difference(variant, checkpoint):
    hf = checkpoint(variant)
    shares, causes, text = why(hf, hf, "indexing", noise=False)
    assert causes["mean_abs"] > 1e-3 and 0.999 < shares["indexing"] < 1.001, text
    assert abs(shares["unexplained"]) < 1e-3 and "B's tokens in A" in text, text
    shares, _, text = why(hf, hf, "indexing", dtype="bf16", noise=False)
    assert 0.999 < shares["indexing"] < 1.001, f"both round alike, since they run the same code: {text}"
    assert abs(shares["rounding"]) < 0.5, f"A in fp32 takes B's tokens too: {text}"
    shares, causes, text = why(hf, hf, "indexing, unsaid", noise=False)
    assert "indexing" not in shares and shares["unexplained"] > 0.3, f"not replayed, it has no name: {text}"
    assert any("indexing was not told apart: B does not say" in note for note in causes["not_measured"]), text


def test_other_experts_and_other_tokens_have_both_a_part(checkpoint):
    hf = checkpoint("deepseek-v32")
    shares, _, text = why(hf, hf, "routing and indexing", noise=False)
    assert min(shares["routing"], shares["indexing"]) > 0.1 and abs(shares["unexplained"]) < 1e-3, text
    shares, _, text = why(hf, hf, "routing", noise=False)
    assert 0.999 < shares["routing"] < 1.001 and abs(shares["indexing"]) < 1e-3, text


@pytest.mark.parametrize(
    ("variant", "layout"),
    [("deepseek-v32", {"ep": 2, "etp": 1}), ("glm-moe-dsa-shared", {"pp": 2})],
    ids=["deepseek-v32", "glm-moe-dsa-shared"],
)
def test_megatron_and_transformers_take_the_tokens_of_each_other(variant, layout, checkpoint, tmp_path):
    hf, mcore = checkpoint(variant), tmp_path / "mcore"
    hf_to_mcore(hf, mcore, MegatronLayout(**layout), transformer_impl="local")
    for a, b, fault in ((mcore, hf, "indexing"), (hf, mcore, "indexing in A")):
        shares, causes, text = why(a, b, fault, layout)
        assert 0.99 < shares["indexing"] < 1.01 and abs(shares["unexplained"]) < 0.01, text
        assert len(causes["not_measured"]) == 1 and "were not exchanged" in causes["not_measured"][0], text


def test_an_indexer_takes_fewer_or_more_tokens_than_it_chooses(checkpoint, tmp_path):
    hf = checkpoint("deepseek-v32")
    other = with_config(hf, tmp_path / "other", index_topk=7)
    for a, b in ((hf, other), (other, hf)):
        shares, _, text = why(a, b, "none", noise=False)
        assert 0.999 < shares["indexing"] < 1.001 and abs(shares["unexplained"]) < 1e-3, text


def test_without_tokens_that_are_left_out_there_is_no_step_of_indexing(checkpoint):
    for variant, length in (("deepseek-v32", 11), ("deepseek-v3", 24)):
        shares, causes, text = why(checkpoint(variant), checkpoint(variant), lengths=(length,), prompts=2)
        assert "indexing" not in shares and causes["not_measured"] == [], text
    shares, _, text = why(checkpoint("deepseek-v32"), checkpoint("deepseek-v32"), lengths=(12,), prompts=2)
    assert "indexing" in shares, text


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


class Alone(ForwardSystem):
    """A system of one module, which is a router and an indexer."""

    name = "alone"

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def routers(self):
        return {3: self.module}

    indexers = routers

    def _unused(self, *_):
        raise AssertionError

    logits = roots = choices = close = _unused


def test_experts_and_tokens_that_cannot_be_replayed_are_refused():
    system, choices = Alone(torch.nn.Identity()), Choices((3,), np.zeros((2, 1, 1), np.int64), None)
    with (
        pytest.raises(ReshardError, match=r"the routers of layers 3 do not choose by torch\.topk"),
        replayed(system, choices),
    ):
        system.module(torch.zeros(3, 4))
    tokens = AttendedTokens()
    with (
        pytest.raises(ReshardError, match=r"the indexers of layers 3 do not choose by torch\.topk"),
        tokens.recorded(system, 0),
    ):
        system.module(torch.zeros(1, 3, 3))
    with pytest.raises(ReshardError, match="B has no indexers in layers 3"), tokens.replayed(system, 0):
        pass


class Indexer(torch.nn.Module):
    """Chooses three tokens, of which -1 is none, as Megatron-Core's does."""

    def forward(self, scores):
        values, indices = scores.topk(3)
        return indices.masked_fill(values == -torch.inf, -1)


def test_an_indexer_chooses_what_another_chose_and_nothing_more():
    generator = torch.Generator().manual_seed(0)
    later = torch.full((7, 7), -torch.inf).triu(1)
    one, other = (torch.randn(1, 7, 7, generator=generator) + later for _ in range(2))
    system, tokens = Alone(Indexer()), AttendedTokens()
    with tokens.recorded(system, 0):
        expected = system.module(one)
    with tokens.replayed(system, 0):
        taken = system.module(other)
    own = system.module(other)
    assert [set(row) for row in taken[0].tolist()] == [set(row) for row in expected[0].tolist()]
    assert [set(row) for row in own[0].tolist()] != [set(row) for row in expected[0].tolist()]
    assert taken[0, :2].tolist() == [[0, -1, -1], [*taken[0, 1, :2].tolist(), -1]]
