"""NeMo-RL's rollouts, checked at each step: its script, which runs with a monitor.

    RESHARD_MONITOR=run.jsonl python -m reshard.integrations.nemo_rl.monitored examples/run_grpo.py --config ...

NeMo-RL compares the logprobs of both sides once the policy's are there, before it masks sequences by their difference
(``compute_and_apply_seq_logprob_error_masking``). The figures are added to those that it returns, and so to NeMo-RL's
logger.
"""

import functools
import runpy
import sys
from typing import Any

from reshard.core.errors import ReshardError
from reshard.integrations.monitoring import VARIABLE, figures_of, monitor


def rollout_of(train_data: Any) -> dict[str, Any]:
    """Return the arguments of `reshard.parity.RolloutMonitor.step` for NeMo-RL's ``train_data``, once it has
    ``prev_logprobs``: all tokens but the first, as in NeMo-RL's loss.

    Raises ReshardError where ``prev_logprobs`` are not there, or the zeros that stand for them.
    """
    if "prev_logprobs" not in train_data or not train_data["prev_logprobs"].any():
        raise ReshardError(
            "NeMo-RL has not computed prev_logprobs, as with loss_fn.force_on_policy_ratio: there is nothing to compare"
        )
    return {
        "train": train_data["prev_logprobs"][:, 1:],
        "inference": train_data["generation_logprobs"][:, 1:],
        "mask": train_data["token_mask"][:, 1:] * train_data["sample_mask"].unsqueeze(-1),
    }


def watch(module: Any) -> None:
    """Add the figures of each rollout to NeMo-RL's, in the `module` that computes them, ``nemo_rl.algorithms.grpo``."""
    theirs = module.compute_and_apply_seq_logprob_error_masking

    @functools.wraps(theirs)
    def compute_and_apply_seq_logprob_error_masking(
        train_data: Any, rewards: Any, seq_logprob_error_threshold: float | None
    ) -> dict[str, Any]:
        figures = figures_of(monitor(), rollout_of, train_data)  # before sequences are masked
        return theirs(train_data, rewards, seq_logprob_error_threshold) | figures

    module.compute_and_apply_seq_logprob_error_masking = compute_and_apply_seq_logprob_error_masking


def main() -> None:
    """Run a script of NeMo-RL's that trains by GRPO, with a monitor."""
    if len(sys.argv) < 2 or monitor() is None:
        raise SystemExit(
            f"{VARIABLE}=run.jsonl python -m reshard.integrations.nemo_rl.monitored SCRIPT ...: give NeMo-RL's "
            "examples/run_grpo.py, and the file of the run"
        )
    from nemo_rl.algorithms import grpo

    watch(grpo)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
