"""Refits of classes whose tensors an engine's loader does more to than copy: zeros that it makes itself, rows that it
sorts by kind, decays that it computes; and of configs to which the engine's own class adds fields."""

import itertools
from pathlib import Path

import pytest
import transformers

from reshard.models.class_fields import OF_ENGINES_CLASS, with_class_fields
from reshard.models.model import different_fields
from reshard.models.without_table import any_model
from tests import install_sglang_cpu
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.model_classes import save
from tests.tools.small_configs import small_config

COUNTING = "GraniteSpeechForConditionalGeneration"
CLASSES = (
    "WhisperForConditionalGeneration",  # no bias of keys, and engines have one
    "FalconForCausalLM",  # queries, keys and values in groups
    "FalconMambaForCausalLM",  # Mamba-1
    "AfmoeForCausalLM",  # fields that vLLM's config class adds
    "MellumForCausalLM",
    "ApertusForCausalLM",  # single numbers
    COUNTING,  # whole ones, which batch norms count
)


def config_of(name: str, **fields) -> transformers.PreTrainedConfig:
    config = small_config(getattr(transformers, name).config_class, itertools.count(300), name)
    config.architectures = [name]
    for field, value in fields.items():
        setattr(config, field, value)
    return config


def made(folder: Path, name: str) -> list[str]:
    for seed in (0, 1):
        save(folder / name / str(seed), config_of(name), seed)
    return [str(folder / name / str(seed)) for seed in (0, 1)]


def test_each_holds_what_its_engines_loader_makes_of_the_saved_model(tmp_path):
    checkpoints = {name: made(tmp_path, name) for name in CLASSES}
    cases = {name: (of, of[1]) for name, of in checkpoints.items()}
    cases |= {f"{name}, of other weights": (of, of[0]) for name, of in checkpoints.items()}
    places = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
    for said in run_on_ranks(2, "judge_each", places, cases, module="refit_every_class_on_cpu"):
        assert said.keys() == cases.keys()
        for name, (outcome, sentence) in said.items():
            assert outcome == ("exact" if name in CLASSES else "WRONG"), (name, outcome, sentence)


if install_sglang_cpu.installed():

    def test_an_sglang_takes_the_names_of_a_model_inside_that_its_transformers_would_rename_twice(tmp_path):
        """The transformers of SGLang's environment has conversions of the inner model that no loading uses."""
        name = "Qwen2AudioForConditionalGeneration"
        checkpoints = made(tmp_path, name)
        cases = {name: (checkpoints, checkpoints[1]), "of other weights": (checkpoints, checkpoints[0])}
        results = run_on_ranks(
            2,
            "judge_each",
            {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()},
            cases,
            module="refit_every_class_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )
        for said in results:
            assert [outcome for outcome, _ in said.values()] == ["exact", "WRONG"], said


def test_what_batch_norms_count_comes_from_one_rank_in_the_dtype_of_the_engine(tmp_path):
    first, second = made(tmp_path, COUNTING)
    places = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
    for said in run_on_ranks(2, "counts", places, first, second, module="refit_every_class_on_cpu"):
        assert said["norms"] > 1
        for how in ("sharded", "whole"):
            assert {*said[how]} == {7.0}, f"{how}: the first rank's, which saves, and not the other's"
        assert "int32" in said["in another dtype"], said


class ConfigOfEngine(transformers.AfmoeConfig):
    """As an engine's own: two fields more, of which it makes the second of the first."""

    def __init__(self, n_group: int = 1, groups_per_token: int | None = None, **fields) -> None:
        super().__init__(**fields)
        self.n_group = n_group
        self.groups_per_token = n_group if groups_per_token is None else groups_per_token


def posted(**fields) -> dict:
    """The config that an engine posts which has read one with these fields beside those of the class."""
    name = "AfmoeForCausalLM"
    config = ConfigOfEngine.from_dict(config_of(name).to_dict() | fields)
    return with_class_fields(config.to_dict(), config, name)


@pytest.mark.parametrize(
    ("of_engine", "of_trainer", "different"),
    [
        ({}, {}, {}),
        ({"n_group": 1}, {}, {}),
        ({"n_group": 1}, {"n_group": 1}, {}),
        ({"n_group": 4}, {"n_group": 4, "groups_per_token": 4}, {}),
        ({"n_group": 4}, {}, {"n_group": (None, 4), "groups_per_token": (None, 4)}),
        ({"groups_per_token": 2}, {}, {"groups_per_token": (None, 2)}),
        ({}, {"n_group": 4}, {"n_group": (4, 1)}),
        ({"n_group": 4}, {"n_group": 1}, {"n_group": (1, 4), "groups_per_token": (None, 4)}),
        # What the engine's class would make of the trainer's config: 4 groups for each token.
        ({"n_group": 4, "groups_per_token": 1}, {"n_group": 4}, {"groups_per_token": (None, 1)}),
        ({}, {"route_scale": 2.0}, {"route_scale": (2.0, 1.0)}),
    ],
    ids=str,
)
def test_a_field_that_the_engines_class_adds_is_compared_unless_the_class_gives_it_that_value(
    of_engine, of_trainer, different
):
    name = "AfmoeForCausalLM"
    trainer = any_model(config_of(name, **of_trainer).to_dict())
    engine = any_model(posted(**of_engine))
    assert different_fields(trainer, engine) == different
    turned = {field: (theirs, ours) for field, (ours, theirs) in different.items()}
    assert different_fields(engine, trainer) == turned


def test_of_transformers_own_class_no_field_is_said_to_be_added():
    name = "AfmoeForCausalLM"
    config = config_of(name, n_group=1)
    plain = config.to_dict()
    assert with_class_fields(plain, config, name) == plain and OF_ENGINES_CLASS not in plain
    assert "n_group" in different_fields(any_model(config_of(name).to_dict()), any_model(plain))


def test_a_theta_beside_those_of_each_kind_of_layer_makes_no_other_model():
    name = "MellumForCausalLM"
    trained, served = config_of(name).to_dict(), config_of(name).to_dict()
    assert "rope_theta" in trained["rope_parameters"]["full_attention"]
    served["rope_parameters"] = trained["rope_parameters"] | {"rope_theta": 1e4, "rope_type": "default"}
    assert different_fields(any_model(trained), any_model(served)) == {}
    served["rope_parameters"] = served["rope_parameters"] | {
        "full_attention": {"rope_type": "default", "rope_theta": 7.0}
    }
    assert list(different_fields(any_model(trained), any_model(served))) == [
        "rope_parameters.full_attention.rope_theta"
    ]


def test_decays_that_no_refit_has_brought_have_no_digest(tmp_path):
    """Their logarithms, which are published, are not kept where vLLM itself makes decays of them."""
    [checkpoint, _] = made(tmp_path, "FalconMambaForCausalLM")
    places = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path), "port": free_port()}
    for said in run_on_ranks(2, "digests", places, checkpoint, module="refit_decays_on_cpu"):
        assert said["decays"] and said["refitted"] == ["no error", "no error"]
        for sentence in said["loaded"] + said["written by others"]:
            assert "is made of something else than a refit has brought" in sentence, said
