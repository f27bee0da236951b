"""Optimizer states of families whose layers are others than Qwen3's: real Megatron-LM trains, saves and resumes."""

from importlib.util import find_spec

import pytest
import torch

from reshard import MegatronLayout, check, hf_to_mcore, mcore_to_mcore
from tests.megatron.test_logits import EP, ETP, flags_at
from tests.megatron.test_optimizer import RESHARDABLE
from tests.starting.ranks import run_on_ranks
from tests.tools.oracle import same, stored_tensors

pytestmark = pytest.mark.skipif(
    find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None,
    reason="megatron-core before 0.19 has no loader of a GPTModel's optimizer for a HybridModel",
)
# Sections of a matrix and norms less 1; a router of ours beside dense layers.
VARIANTS = ("qwen3-next", "ernie")
SPLIT, TRAINED = MegatronLayout(tp=2, pp=2, ep=2, etp=1), MegatronLayout(ep=2, etp=1)
ITERATION = "iter_0000001"


def test_a_training_that_was_moved_there_and_back_goes_on_as_if_it_had_not_been(checkpoint, tmp_path):
    runs, cases = [], []
    for variant in VARIANTS:
        source, folder = checkpoint(variant, dtype=torch.bfloat16), tmp_path / variant
        folder.mkdir()
        hf_to_mcore(source, folder / "mcore", transformer_impl="local")
        flags = flags_at(folder / "mcore", f"{EP} 2 {ETP} 1", RESHARDABLE, "--ckpt-format torch_dist")
        runs.append((flags, str(folder / "mcore"), str(folder / "run"), 1, 1))
        cases.append((flags, "", [str(folder / "run"), str(folder / "back")], 1, ""))
    undisturbed = run_on_ranks(2, "train_each", runs, module="optimizer_on_cpu")
    for variant in VARIANTS:
        form = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}
        form["hf_config"], folder = checkpoint(variant, dtype=torch.bfloat16), tmp_path / variant
        mcore_to_mcore(folder / "run", folder / "split", SPLIT, **form)
        mcore_to_mcore(folder / "split", folder / "back", TRAINED, **form)
        trained, back = (stored_tensors(folder / name / ITERATION) for name in ("run", "back"))
        assert same(trained, back) == [] and check(folder / "split").ok, variant
    for resumed, losses in zip(
        run_on_ranks(2, "resume", cases, module="optimizer_on_cpu"), undisturbed, strict=True
    ):
        for variant, (own, moved), of_variant in zip(VARIANTS, resumed, losses, strict=True):
            assert moved == own and own[:2] == (1, []) and own[2] > 100, variant
            assert moved[-1] == of_variant[1:] != of_variant[:1], variant
