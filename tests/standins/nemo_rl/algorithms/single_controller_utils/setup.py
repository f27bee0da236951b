"""In the place of how NeMo-RL's SingleController makes its synchronizer of weights."""

from nemo_rl.weight_sync.factory import create_weight_synchronizer  # noqa: F401
