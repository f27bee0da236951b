"""Refits without a table of models that only newer versions of vLLM serve. `tests.campaigns.matrix` names this
file to pytest, since CI has an older one, and of the classes those that a version and its transformers have."""

import pytest

from tests.refit.test_without_table import check, sides
from tests.starting.ranks import run_on_ranks
from tests.tools.model_classes import NEWEST, make

# Read of a cache in fp8 alone; MiniMax-M3's are what dummy weights make of them, with which such a cache is refused.
OF_CACHE = ("._k_scale", "._v_scale", "._q_scale", "._prob_scale")
# Whose own save_pretrained writes names that vLLM's loader does not know.
RENAMED = ("KimiLinearForCausalLM",)


def refitted(name: str, folder) -> list[dict]:
    checkpoints = [str(make(folder / str(seed), name, seed)) for seed in (0, 1)]
    cases = {name: (checkpoints, {"tp": 2})}
    results = run_on_ranks(2, "refit_each", sides(folder, 2, 2, True), cases, module="refit_newest_on_cpu")
    for of in results:
        if not isinstance(of[name], str):
            now, (before, expected), _ = of[name]
            for held in (now, before, expected):
                for key in [key for key in held if key.endswith(OF_CACHE)]:
                    del held[key]
    return results


@pytest.mark.parametrize("name", [name for name in NEWEST if name not in RENAMED])
def test_a_class_holds_what_vllms_loader_makes_of_the_saved_model(name, tmp_path):
    check(refitted(name, tmp_path), name, 2)


@pytest.mark.parametrize("name", RENAMED)
def test_a_model_that_transformers_saves_under_other_names_is_refused(name, tmp_path):
    for of in refitted(name, tmp_path):
        assert "vLLM's own loader refuses the model's tensors (KeyError" in of[name], of[name]
