"""Rollouts of verl, ms-swift and NeMo-RL, checked beside their own steps: with the real verl and ms-swift in
environments of their own. No package index has NeMo-RL: its function is a stand-in, and with
``NEMO_RL_CLONE=DIRECTORY`` the real one."""

import __future__

import ast
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reshard import ReshardError
from reshard.integrations.monitoring import monitor
from reshard.integrations.nemo_rl import monitored as nemo_rl
from reshard.parity import check_rollout, read_run
from tests.integrations.test_swift import PACKAGES
from tests.integrations.test_swift import variables as swift_variables
from tests.starting.warm import python_with_ray
from tests.tools.clones import STANDINS, variables
from tests.tools.environments import environment_before_ours, run

CLONE = Path(os.environ["NEMO_RL_CLONE"]).resolve() if "NEMO_RL_CLONE" in os.environ else None

IN_VERL = """
import json, sys
import numpy as np, torch
import verl
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils.debug.metrics import calculate_debug_metrics

torch.manual_seed(0)
train = -torch.rand(4, 8)
engine = train + 0.02 * torch.randn(4, 8)
mask = (torch.arange(8) < torch.tensor([[8], [3], [5], [1]])).long()
tensors = dict(old_log_probs=train, rollout_log_probs=engine, response_mask=mask, responses=mask)
versions = dict(min_global_steps=np.array([4, 5, 5, 2], object))
batch = DataProto.from_dict(tensors, versions, meta_info=dict(global_steps=6))
said = {"first": calculate_debug_metrics(batch)}
said["theirs"] = compute_offpolicy_metrics(train, engine, mask)
said["without versions"] = calculate_debug_metrics(DataProto.from_dict(tensors))
from reshard.integrations.verl.monitored import rollout_of
from reshard import ReshardError
said["refused"] = []
copies = DataProto.from_dict(tensors)
copies.batch["old_log_probs"] = copies.batch["rollout_log_probs"]
for wrong in (copies, DataProto.from_dict({"old_log_probs": train}), DataProto.from_dict({"rollout_log_probs": train})):
    try:
        rollout_of(wrong)
    except ReshardError as error:
        said["refused"].append(str(error))
print("SAID", json.dumps(said))
"""

IN_SWIFT = """
import json, sys
import tests.starting.swift_imports
import torch
from reshard.integrations import swift
from reshard import ReshardError
from swift.megatron import trainers
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.rlhf_trainers.utils import build_rollout_logps

torch.manual_seed(0)
batches = []
for lengths, width in (((3, 5), 6), ((4, 1), 5)):
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]  # ms-swift pads on the left
    batch = GRPOBatch(mask, torch.zeros(2, dtype=torch.bool), torch.tensor(lengths))
    batch.old_per_token_logps = torch.where(mask, -torch.rand(2, width), -1e10)
    sampled = [[(row[chosen] + 0.02).tolist()] for row, chosen in zip(batch.old_per_token_logps, mask)]
    batch.rollout_per_token_logps = build_rollout_logps(sampled, mask, mask.device)
    batches.append({"grpo_batch": batch})
trainers.MegatronGRPOTrainer._generate_and_score_completions = lambda self, inputs: batches
swift.watch(sys.argv[1])
said = {"made": [kind.__qualname__ for kind in trainers.MegatronGRPOTrainer.__mro__[:2]]}
swift.is_watching_rank = lambda: True
made = trainers.MegatronGRPOTrainer.__new__(trainers.MegatronGRPOTrainer)
said["returns"] = made._generate_and_score_completions([]) is batches
one = batches[0]["grpo_batch"]
values = [torch.cat([getattr(b["grpo_batch"], name)[b["grpo_batch"].completion_mask] for b in batches])
          for name in ("old_per_token_logps", "rollout_per_token_logps")]
said["theirs"] = {name: float(value) for name, value in GRPOTrainer._compute_rollout_offpolicy_metrics(
    None, *(v[None].clone() for v in values), torch.ones(1, 13, dtype=torch.bool)).items()}
one.rollout_per_token_logps = None
made._generate_and_score_completions([])
try:
    swift.rollout_of(batches)
except ReshardError as error:
    said["refused"] = str(error)
print("SAID", json.dumps(said))
"""


def said_by(command: list[str], **options) -> dict:
    """What a process says."""
    [line] = [line for line in run(command, **options).splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


@pytest.mark.install
def test_verls_metrics_have_ours_by_two_variables(tmp_path):
    """The figures are those of verl where it has the same."""
    ours = {
        "VERL_USE_EXTERNAL_MODULES": "reshard.integrations.verl.monitored",
        "RESHARD_MONITOR": str(tmp_path / "run.jsonl"),
    }
    (tmp_path / "in_verl.py").write_text(IN_VERL)
    command = [python_with_ray(), tmp_path / "in_verl.py"]
    said = said_by(command, env=variables(STANDINS) | ours, cwd=tmp_path)
    first, theirs = said["first"], said["theirs"]
    assert first["training/rollout_probs_diff_valid"] == 1, "verl's own are there"
    assert first["reshard/tokens"] == 17 and first["reshard/ok"] == 1
    assert first["reshard/kl_k1"] == pytest.approx(theirs["kl"], rel=1e-4)
    assert first["reshard/kl_estimate_reverse"] == pytest.approx(theirs["k3_kl"], rel=1e-3)
    # The second moments of the weights: verl's chi2 + 1 is mean r^2, ours is in the effective sample size.
    ratio_squared = first["reshard/ratio_mean"] ** 2 / first["reshard/ess"]
    assert ratio_squared - 1 == pytest.approx(theirs["chi2_token"], rel=1e-3)
    assert first["reshard/lag_mean"] == pytest.approx((8 * 1 + 1 * 3) / 17) and first["reshard/lag_max"] == 3
    assert "reshard/lag_mean" not in said["without versions"]
    assert [sentence.partition(":")[0] for sentence in said["refused"]] == [
        "old_log_probs are the rollout's own (rollout_correction.bypass_mode)",
        "the batch has no rollout_log_probs",
        "the batch has no old_log_probs yet",
    ]
    assert read_run(tmp_path / "run.jsonl").steps.tolist() == [0, 1]
    control = said_by_without(command, ours, tmp_path)
    assert not any(name.startswith("reshard/") for name in control["first"])


def said_by_without(command: list, ours: dict, folder: Path) -> dict:
    """What verl says without the variable that names our module."""
    return said_by(
        command, env=variables(STANDINS) | {"RESHARD_MONITOR": ours["RESHARD_MONITOR"]}, cwd=folder
    )


@pytest.mark.install
def test_ms_swifts_trainer_is_watched_by_a_line_of_a_plugin(tmp_path):
    python = environment_before_ours(tmp_path / "venv", PACKAGES)
    (tmp_path / "in_swift.py").write_text(IN_SWIFT)
    path = tmp_path / "run.jsonl"
    said = said_by([python, tmp_path / "in_swift.py", path], env=swift_variables(), cwd=tmp_path)
    assert said["made"] == ["watch.<locals>.WatchedGRPOTrainer", "MegatronGRPOTrainer"] and said["returns"]
    assert "rollout_per_token_logps" in said["refused"]
    found = read_run(path)
    assert found.steps.tolist() == [0], "the second has no logprobs of the rollout"
    last = {name: figure.last for name, figure in found.figures().items()}
    assert found.tokens.tolist() == [13] and last["mean_abs"] == pytest.approx(0.02, rel=1e-4)
    assert last["kl_k1"] == pytest.approx(said["theirs"]["kl"], rel=1e-4)
    assert last["kl_estimate_reverse"] == pytest.approx(said["theirs"]["k3_kl"], rel=1e-2)


def masking_function():
    """NeMo-RL's function, from its source where there is a clone, else a stand-in."""
    file = (CLONE or STANDINS) / "nemo_rl" / "algorithms" / "grpo.py"
    [function] = [
        node
        for node in ast.parse(file.read_text()).body
        if getattr(node, "name", "") == "compute_and_apply_seq_logprob_error_masking"
    ]
    module = SimpleNamespace()
    names = {"torch": torch, "BatchedDataDict": dict, "Optional": object, "__name__": "grpo"}
    code = compile(ast.Module([function], []), str(file), "exec", flags=__future__.annotations.compiler_flag)
    exec(code, names)
    module.compute_and_apply_seq_logprob_error_masking = names[function.name]
    return module


def test_nemo_rls_figures_have_ours_before_it_masks_sequences(tmp_path, monkeypatch):
    monkeypatch.setenv("RESHARD_MONITOR", str(tmp_path / "run.jsonl"))
    monitor.cache_clear()
    module = masking_function()
    nemo_rl.watch(module)
    torch.manual_seed(0)
    prev = -torch.rand(3, 9)
    data = {
        "prev_logprobs": prev,
        "generation_logprobs": prev + 0.03 * torch.randn(3, 9),
        "token_mask": (torch.arange(9) >= torch.tensor([[2], [4], [0]])).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    data["generation_logprobs"][:, 0] = float("nan")  # of the first token nobody asks
    expected = check_rollout(
        prev[:2, 1:], data["generation_logprobs"][:2, 1:], data["token_mask"][:2, 1:]
    ).to_dict("reshard/")
    # By keywords, as NeMo-RL calls it.
    figures = module.compute_and_apply_seq_logprob_error_masking(
        train_data=data, rewards=torch.zeros(3), seq_logprob_error_threshold=1e-9
    )
    assert {name: figures[name] for name in expected} == expected and expected["reshard/tokens"] == 7 + 5
    assert data["sample_mask"].sum() == 0, "then it masks"
    if CLONE is not None:
        assert figures["max_seq_mult_prob_error"] == pytest.approx(
            figures["reshard/sample_mult_prob_error_max"], rel=1e-5
        )
    assert read_run(tmp_path / "run.jsonl").tokens.tolist() == [12]
    with pytest.raises(ReshardError, match="force_on_policy_ratio"):
        nemo_rl.rollout_of(data | {"prev_logprobs": torch.zeros(3, 9)})
    monitor.cache_clear()


def test_a_rollout_that_cannot_be_checked_does_not_end_a_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RESHARD_MONITOR", str(tmp_path / "run.jsonl"))
    monitor.cache_clear()
    module = masking_function()
    nemo_rl.watch(module)
    data = {
        "prev_logprobs": torch.zeros(2, 4),
        "generation_logprobs": torch.zeros(2, 4),
        "token_mask": torch.ones(2, 4),
        "sample_mask": torch.ones(2),
    }
    figures = module.compute_and_apply_seq_logprob_error_masking(data, torch.zeros(2), None)
    assert not any(name.startswith("reshard/") for name in figures) and "num_masked_seqs" in figures
    assert "a rollout is not checked: NeMo-RL has not computed prev_logprobs" in caplog.text
    monitor.cache_clear()
    monkeypatch.delenv("RESHARD_MONITOR")
    assert monitor() is None
    monitor.cache_clear()
