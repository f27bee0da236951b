"""A drafter that is trained beside a model is refitted with it, bit for bit what vLLM's own loader makes of its files,
and drafts by it."""

import pytest
import torch

from tests.engines.test_engine import run
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3

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
