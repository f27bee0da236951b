"""Refits of a model with a drafter that is a model of its own, bit for bit what vLLM's own loaders make of the files of
both; and what is refused, in a sentence, before anything is changed."""

import pytest
import torch
from safetensors.torch import load_file

from reshard import MegatronLayout, hf_to_mcore
from tests import install_sglang_cpu
from tests.megatron.test_logits import TP, flags_at
from tests.starting import warm
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3
from tests.tools.model_classes import make as make_class

MODULE = "refit_drafters_on_cpu"
# What is said of each of the cases below, or the names of what is not as vLLM's loader makes it of the trainer's files.
SAID = {
    "exchanged": ["draft.model.layers.0.hidden_norm.weight", "draft.model.layers.0.input_layernorm.weight"],
    "same config": [],
    "skipped": "Eagle3LlamaForCausalLM does not take more_t2d of the trainer's drafter, and would draft by another",
    "unknown": "vLLM's own loader refuses the model's tensors",
    "config": "the trainer's drafter has rms_norm_eps 0.001, but the drafter of vLLM 1e-06",
    "narrow": "vLLM's own loader refuses the model's tensors",
    "no fc": "has draft.model.fc.weight, which the trainer's drafter does not have and a refit would not bring",
    "no d2t": "has draft.draft_id_to_target_id, which the trainer's drafter does not have",
    "no such name": "the drafter has no embed_tokens.weight that could be left out",
    "own embedding alone": "one tensor for its model's and its drafter's embed_tokens.weight",
    "equal when loaded": "had the model's own when it was loaded",
    "own in the engine alone": "has draft.model.embed_tokens.weight, which the trainer's drafter does not have",
    "dummy": "was not read (load_format='dummy')",
    "dummy that nobody trains": "drafts tokens by dummy weights (load_format='dummy'), and the trainer has no drafter",
    "nobody": [],
    "no drafter": "the trainer has a drafter (d2t and 13 more), and this vLLM drafts by no other model",
    "without it": [],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [str(make(folder / str(seed), "qwen3", torch.bfloat16, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def pairs(models, tmp_path_factory):
    """By kind of drafter, two pairs of a model and a drafter."""
    folder = tmp_path_factory.mktemp("drafters")
    kinds = {"few tokens": (64, False), "all tokens": (None, False), "own embedding": (64, True)}
    return {
        kind: [
            [model, Eagle3(model, *how, seed=seed).publish(folder / kind / str(seed))]
            for seed, model in enumerate(models)
        ]
        for kind, how in kinds.items()
    }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "trainers, together, options",
    [(None, True, {}), (3, False, {"backend": "nccl", "delta": True})],
    ids=["on the same ranks", "by changes"],
)
def test_model_and_drafter_hold_what_vllms_loaders_make_of_their_files(
    tp, trainers, together, options, pairs, tmp_path
):
    trainers = trainers or tp
    sides = {
        "trainer": trainers,
        "engine": tp,
        "together": together,
        "folder": str(tmp_path),
        "port": free_port(),
    }
    cases = {kind: (of_kind, {"tp": tp}) for kind, of_kind in pairs.items()}
    ranks = trainers if together else trainers + tp
    results = run_on_ranks(ranks, "refit_each", sides, cases, options, module=MODULE)
    held = [of for of in results if of]
    assert len(held) == tp
    for of in held:
        for kind, outcome in of.items():
            assert outcome["wrong"] == [[], [], []], kind
            assert outcome["version"] == 2 and outcome["differ"] > 20


def test_megatron_refits_a_drafter_beside_its_model_and_leaves_it_alone_without_one(models, pairs, tmp_path):
    hf_to_mcore(models[1], tmp_path / "mcore", MegatronLayout())
    flags = flags_at(tmp_path / "mcore", f"{TP} 2")
    sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(tmp_path)}
    arguments = sides, flags, str(tmp_path / "mcore"), pairs["few tokens"], {"tp": 2}
    for of in run_on_ranks(2, "from_megatron", *arguments, module=MODULE):
        assert of["wrong"] == [] and of["version"] == 5
        before, after, alone, exchanged = of["digests"]
        assert before != after == alone != exchanged, "what nobody trains has the same digest"
        [left] = of["left"]
        assert left["what"] == "left alone" and "of the drafter, as it was loaded" in left["how"]
        assert left["tensors"] >= 11
        for what, why in (("half", "a refit of it failed"), ("lost", "it was lost in sleep")):
            said, then, wrong = of[what]
            assert f"this vLLM's drafter is not whole, since {why}, and the trainer has no drafter" in said
            assert then == "no error" and wrong == [], "another refit has mended it"


@pytest.fixture(scope="module")
def said(models, pairs, tmp_path_factory):
    """What is said of each case of `SAID`, or which tensors are wrong then."""
    [hf, few], [_, changed] = pairs["few tokens"]
    own, other = (pair[1] for pair in pairs["own embedding"])
    drafter = Eagle3(hf, 64, True)
    embedding = load_file(f"{hf}/model.safetensors")["model.embed_tokens.weight"]
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(embedding)
    equal = drafter.publish(tmp_path_factory.mktemp("equal") / "drafter")
    dummy, no_embedding = {"load_format": "dummy"}, {"without": ["embed_tokens.weight"]}
    both, model = [hf, few], [hf]
    cases = {
        "exchanged": (both, {}, [hf, changed], "exchanged", {}),
        **{
            change: (both, {}, both, change, {})
            for change in ("same config", "skipped", "unknown", "config", "narrow", "no fc")
        },
        "no d2t": (both, {}, both, "", {"without": ["d2t"]}),
        "no such name": (both, {}, both, "", no_embedding),
        "own embedding alone": (both, {}, [hf, own], "", {}),
        "equal when loaded": ([hf, equal], {}, [hf, other], "", {}),
        "without it": ([hf, equal], {}, [hf, other], "", no_embedding),
        "own in the engine alone": ([hf, own], {}, [hf, other], "", no_embedding),
        "dummy": (both, dummy, both, "", {}),
        "dummy that nobody trains": (both, dummy, model, "", {}),
        "nobody": (both, {}, [models[1]], "", {}),
        "no drafter": (model, {}, both, "", {}),
    }
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path_factory.mktemp("said"))}
    [results] = run_on_ranks(1, "said", sides, cases, module=MODULE)
    return results


@pytest.mark.parametrize("case", SAID)
def test_what_would_be_another_drafter_is_refused(case, said):
    expected, found = SAID[case], said[case]
    if isinstance(expected, str):
        assert expected in found, found
    else:  # an embedding that the trainer leaves out is the model's
        assert [name for name in found if case != "without it" or "embed_tokens" not in name] == expected


if install_sglang_cpu.installed():

    def on_sglang(folder, ranks: int, function: str, cases: dict) -> list[dict]:
        sides = {"trainer": ranks, "engine": ranks, "together": True, "folder": str(folder)}
        return run_on_ranks(
            ranks,
            function,
            sides,
            cases,
            module="refit_drafters_sglang_on_cpu",
            python=warm.python_of_sglang(),
            environment=install_sglang_cpu.environment_of_engine(),
        )

    @pytest.mark.parametrize("tp", [1, 2])
    def test_model_and_drafter_hold_what_sglangs_loaders_make_of_their_files(tp, pairs, tmp_path):
        cases = {kind: (pairs[kind], {"tp": tp}) for kind in ("few tokens", "all tokens")}
        for of in on_sglang(tmp_path, tp, "refit_each", cases):
            for kind, outcome in of.items():
                assert outcome["wrong"] == [] and outcome["differ"] > 20, kind
                before, after, alone = outcome["digests"]
                assert before != after == alone, "what nobody trains has the same digest"
                assert not [name for name in outcome["drafts changed"] if "embed_tokens" not in name]
                assert outcome["stale"] == (["draft.hot_token_id"] if kind == "few tokens" else [])
                assert outcome["version"] == (2 if kind == "few tokens" else 1)
                [left] = outcome["left"]
                assert left["what"] == "left alone" and "of the drafter, as it was loaded" in left["how"]

    def test_what_would_be_another_drafter_of_an_sglang_is_refused(models, pairs, tmp_path):
        (few, _), (whole, _), (own, _) = (
            pairs[kind] for kind in ("few tokens", "all tokens", "own embedding")
        )
        no_embedding = {"without": ["embed_tokens.weight"]}
        cases = {
            "fits": (few, {}, few, {}, ""),
            "own embedding": (own, {}, own, {}, ""),
            "without it": (own, {}, own, no_embedding, ""),
            "skipped": (few, {}, few, {}, "extra"),
            "another shape": (few, {}, whole, {}, ""),
            "no tokens": (few, {}, few, {"without": ["d2t"]}, ""),
            "dummy that nobody trains": (few, {"load_format": "dummy"}, few[:1], {}, ""),
            "nobody": (few, {}, few[:1], {}, ""),
            "lost when released": (few, {"enable_memory_saver": True}, few, {}, ""),
        }
        [said] = on_sglang(tmp_path, 1, "said", cases)
        assert said["fits"] == said["without it"] == said["nobody"] == "no error"
        for case, sentence in {
            "own embedding": "this SGLang has one tensor for its model's and its drafter's embed_tokens.weight",
            "skipped": "LlamaForCausalLMEagle3 does not take extra of the trainer's drafter",
            "another shape": "",
            "no tokens": "the trainer's drafter has no d2t, and this SGLang's [((64,), 'int64')]",
            "dummy that nobody trains": "drafts tokens by dummy weights (load_format='dummy')",
            "lost when released": "--enable-draft-weights-cpu-backup",
        }.items():
            assert sentence in said[case] and said[case] != "no error", said[case]


def of_lost(function, pairs, folder, *more, ranks=1):
    sides = {
        "trainer": 1,
        "engine": 1,
        "together": ranks == 1,
        "folder": str(folder),
        "port": free_port(),
    }
    return run_on_ranks(ranks, function, sides, pairs, *more, module="refit_drafters_lost_on_cpu")


def test_a_drafter_is_the_trainers_after_a_sleep_or_not_served(pairs, tmp_path):
    """Not what was kept while nobody had brought it, nor what sleep has left."""
    [of] = of_lost("asleep", pairs["few tokens"], tmp_path)
    assert of["first"] == of["after sleep"] == of["left alone"] == [] and of["lost"]
    assert of["left alone after sleep"] == [] or not of["ready"], of


def test_a_drafter_that_was_lost_before_anybody_watched_is_not_served(pairs, tmp_path):
    [of] = of_lost("unwatched", pairs["few tokens"], tmp_path)
    assert (
        "drafter is not whole, since it may have been lost in sleep before reshard was connected"
        in of["said"]
    )
    assert not of["ready"] and of["both"] == of["alone"]
    assert all(name.endswith("_scale") for name in of["both"]), "buffers that are used with a cache in fp8"


def test_a_tower_is_the_trainers_after_a_sleep(tmp_path):
    checkpoints = []
    for seed in (0, 1):
        make_class(tmp_path / str(seed), "Qwen3VLForConditionalGeneration", seed)
        checkpoints.append(str(tmp_path / str(seed)))
    [of] = of_lost("tower_asleep", checkpoints, tmp_path)
    assert of == {"first": [], "after sleep": []}


def test_a_connection_that_is_refused_leaves_others_as_they_were(pairs, tmp_path):
    [of] = of_lost("beside", pairs["few tokens"], tmp_path)
    for refused, said in of.values():
        assert "fc.weight" in refused and said == "no error"


@pytest.mark.parametrize("with_drafter", [False, True])
def test_all_may_be_begun_on_a_new_connection(with_drafter, pairs, tmp_path):
    assert of_lost("begun", pairs["few tokens"], tmp_path, with_drafter, ranks=2) == [True, True]


def test_a_drafter_in_pieces_is_not_served_after_vllm_has_loaded_the_model_alone(pairs, tmp_path):
    [of] = of_lost("reloaded", pairs["few tokens"], tmp_path)
    assert "on purpose" in of["said"] and of["drafter"] and not of["ready"] and of["mended"]
