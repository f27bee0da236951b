"""A drafter that is trained beside a model is refitted with it, or comes with it through a chain of deltas, bit for bit
what vLLM's own loader makes of its files, and drafts by it."""

import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reshard import DeltaWriter
from reshard.cli.main import cli
from reshard.trainers import FsdpModel, WithDrafter
from tests.engines.test_engine import run
from tests.tools.chains import spoil
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3, load_drafter

VOCABULARY = 512  # of the 1,024 tokens of the model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return [str(make(folder / str(seed), "served-llama", torch.bfloat16, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def drafters(models, tmp_path_factory):
    """Directories of drafters, by kind: two of each, of which the second repeats what its model says."""
    folder = tmp_path_factory.mktemp("drafters")
    kinds = {"few tokens": (VOCABULARY, False), "own embedding": (None, True)}
    return {
        kind: [
            Eagle3(models[0], *how, seed=0).publish(folder / kind / "0"),
            Eagle3(models[0], *how, seed=1).repeat(models[1]).publish(folder / kind / "1"),
        ]
        for kind, how in kinds.items()
    }


@pytest.mark.parametrize("kind, tp", [("few tokens", 1), ("own embedding", 2)])
def test_a_live_vllm_drafts_by_the_drafter_that_it_was_refitted_with(kind, tp, models, drafters, tmp_path):
    pairs = list(zip(models, drafters[kind], strict=True))
    outcome = run(tmp_path, tp, "drafters_on_cpu.refitted", pairs, {"tensor_parallel_size": tp})
    first, second, mixed = outcome["refitted"]
    assert first == outcome["before"], "the same weights change nothing"
    assert second == outcome["loaded"], "tokens, drafts and bits, as a vLLM has that has loaded both"
    assert second["tokens"] == outcome["alone"], "a drafter changes no token"
    shared = {"model.embed_tokens.weight"} if kind == "few tokens" else set()
    own = second["bits"].keys() - shared - {"draft_id_to_target_id"}
    assert len(own) >= 10 and all(second["bits"][name] != first["bits"][name] for name in own)
    assert all(mixed["bits"][name] == first["bits"][name] for name in own)
    assert mixed["tokens"] == second["tokens"] and mixed["drafts"] != second["drafts"]
    assert len(second["drafts"]) < len(mixed["drafts"]), "more of the new drafter's tokens are accepted"
    assert outcome["version"] == 2
    (policy, one), (other, two), (same, again) = outcome["digests"]
    assert policy != other == same and one == again != two, "the drafter has a digest of its own"
    brought = {entry["how"]: entry["tensors"] for entry in outcome["described"] if entry["what"] == "brought"}
    # of one what is shared is the model's, of the other all tokens are drafted
    assert brought["of the drafter, from the trainer"] == len(second["bits"]) - 1


def write_chain(place, models, drafters, steps) -> None:
    """A chain with a version for each of some steps, numbers of a model's and a drafter's directory."""

    def pair(model: int, drafter: int) -> list[torch.nn.Module]:
        policy = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.bfloat16)
        return [policy, load_drafter(drafters[drafter], models[0])]

    held = pair(0, 0)
    both = WithDrafter(FsdpModel(held[0]), held[1])
    writer = DeltaWriter(both, models[0], place, drafter_base=drafters[0])
    for step in steps:
        for module, other in zip(held, pair(*step), strict=True):
            module.load_state_dict(other.state_dict())
        writer.save()
    writer.close()


def test_a_live_vllm_follows_a_chain_of_a_model_and_its_drafter(models, drafters, tmp_path):
    few, steps = drafters["few tokens"], [(1, 0), (1, 1), (0, 0)]
    chains = {name: str(tmp_path / name) for name in ("chain", "spoiled", "other")}
    write_chain(chains["chain"], models, few, steps)
    third = Eagle3(models[0], VOCABULARY, seed=2).publish(tmp_path / "third")
    write_chain(chains["other"], models, [third], [(1, 0)])
    shutil.copytree(chains["chain"], chains["spoiled"])
    spoil(tmp_path / "spoiled", version=3)
    saved = []
    for version in range(1, len(steps) + 1):
        pair = [str(tmp_path / f"{kind}{version}") for kind in ("model", "drafter")]
        arguments = [models[0], chains["chain"], pair[0], "--version", str(version)]
        done = CliRunner().invoke(cli, ["delta", "apply", *arguments, "--drafter", few[0], pair[1]])
        assert done.exit_code == 0, done.output
        saved.append(pair)
    # what was saved is what was trained
    for (model, drafter), pair in zip(steps, saved, strict=True):
        for trained, written in ((models[model], pair[0]), (few[drafter], pair[1])):
            left, right = (load_file(f"{place}/model.safetensors") for place in (trained, written))
            assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    outcome = run(tmp_path, 1, "drafters_on_cpu.followed", [models[0], few[0]], chains, len(steps), saved)
    assert [reached for reached, _, _ in outcome["versions"]] == [1, 2, 3]
    assert [version for _, version, _ in outcome["versions"]] == [[1], [2], [3]]
    first, second, third = (held for _, _, held in outcome["versions"])
    assert [first, second, third] == outcome["loaded"], "tokens and bits, as vLLMs that have loaded the files"
    assert outcome["base"]["tokens"] != first["tokens"] == second["tokens"] != third["tokens"]
    assert outcome["base"]["tokens"] == third["tokens"], "a drafter changes no token"
    of_drafter = [name for name in first["bits"] if name.startswith("draft.")]
    assert sum(first["bits"][name] != second["bits"][name] for name in of_drafter) >= 10, "the control"
    for case, sentence in (
        ("spoiled", "delta-000003.safetensors was altered after it was written"),
        ("other", "the engine drafts by another drafter than that of"),
    ):
        said, (version, held) = outcome[case]
        assert sentence in said and version == [2] and held == second, (case, said)
    assert outcome["back"] == [2, [2], second] and outcome["forward"] == [3, [3], third]
