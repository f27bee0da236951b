"""The common state of a training checkpoint: its progress, its schedule, and the groups of parameters of its
optimizers."""

from dataclasses import dataclass
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.limits import MAX_ITERATION
from reshard.formats.pickles import writable
from reshard.formats.torch_dist import Checkpoint
from reshard.megatron.gtp import ARGUMENTS, SHARDS_ARGUMENTS
from reshard.megatron.hybrid import IN_PATTERN, OF_HYBRID
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model

# Entries of the common state that are written anew, or belong to the ranks that saved them.
_NOT_COMMON = (
    "args",
    "iteration",
    "checkpoint_version",
    "content_metadata",
    "rerun_state_machine",
    "rng_state",
)
# The first version in which expert tensor parallelism alone gives experts an optimizer of their own.
EXPERTS_APART_BY_TP = (0, 19)
# Megatron's optimizers that all parameters have; others, such as Muon, are for matrices alone.
ONE_OPTIMIZER = (None, "adam", "sgd")
# Arguments that say how far the training is.
_OF_TRAINING = (
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "use_distributed_optimizer",
)


@dataclass(frozen=True)
class TrainingState:
    """The rest of a training checkpoint, which a run needs to resume from its tensors.

    `content_metadata` names the format of the optimizer states, `common` holds the groups of parameters, the
    schedule and the like, and `storages` the tensors in these.
    """

    iteration: int
    args: dict[str, Any]
    content_metadata: dict[str, Any]
    common: dict[str, Any]
    storages: dict[str, bytes]

    @staticmethod
    def of(checkpoint: Checkpoint) -> "TrainingState":
        """Read that of a checkpoint. Raises ReshardError if it is not plain data."""
        where = f"{checkpoint.directory} (common state)"
        value = checkpoint.common()
        iteration, content = value.get("iteration"), value.get("content_metadata") or {}
        if type(iteration) is not int or not isinstance(content, dict):
            raise ReshardError(
                f"{where} has no iteration, from which a training could go on: pass --without-optimizer"
            )
        of_format = {key: item for key, item in content.items() if str(key).startswith("distrib_optim")}
        common = {key: item for key, item in value.items() if key not in _NOT_COMMON}
        return TrainingState(
            iteration,
            writable(value["args"], where),
            writable(of_format, where),
            writable(common, where),
            checkpoint.common_storages(),
        )

    def resumed_iteration(self, where: object) -> int:
        """Return the iteration that a run resumes from. Raises ReshardError for 0, which Megatron does not
        resume."""
        if not 0 < self.iteration <= MAX_ITERATION:
            raise ReshardError(
                f"{where} is of iteration {self.iteration}, from which Megatron does not resume: pass --iteration, or "
                f"--without-optimizer for the weights alone"
            )
        return self.iteration

    def args_for(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the training's arguments with these, which describe the model and its layout. Those of the
        other class of models are left out, and states of RNGs, which are those of ranks, said not to be there."""
        left_out = {*OF_HYBRID, *IN_PATTERN, "spec", *ARGUMENTS, *SHARDS_ARGUMENTS}
        others = {n: v for n, v in self.args.items() if n not in left_out}
        kept = {name: self.args[name] for name in _OF_TRAINING if name in self.args}
        return others | args | kept | {"no_save_optim": False, "no_save_rng": True}

    def common_for(
        self, model: Model, layout: MegatronLayout, megatron_lm: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the common state for a layout, and for a version of Megatron-LM. Where their ranks are others than
        those of the rest, experts have an optimizer of their own, the second of two.

        Raises ReshardError if it has other optimizers, and would need these.
        """
        saved = self.common.get("optimizer")
        if not isinstance(saved, dict) or not saved:
            return self.common
        has_other_tp = layout.expert_tp != layout.tp and megatron_lm >= EXPERTS_APART_BY_TP
        apart = model.num_experts > 0 and (layout.ep > 1 or has_other_tp)
        chain = (
            [saved[index] for index in sorted(saved)] if all(type(key) is int for key in saved) else [saved]
        )
        if self.args.get("optimizer") not in ONE_OPTIMIZER:
            return self._common_of_several(chain, apart)
        if len(chain) == 1 + apart:
            return self.common
        if [_is_of_experts(optimizer) for optimizer in chain] not in ([False], [False, True]):
            raise ReshardError(
                f"the training has {len(chain)} optimizers, and not one, or one for the experts beside it: pass "
                f"--without-optimizer for the weights alone"
            )
        moved = {0: chain[0], 1: _of_experts(chain[0], model)} if apart else _joined(*chain)
        return self.common | {"optimizer": moved}

    def _common_of_several(self, chain: list[Any], apart: bool) -> dict[str, Any]:
        """Return the common state for a run in which matrices have one optimizer and other parameters another
        (Muon and Adam). Raises ReshardError if experts would get other optimizers than they had."""
        if any(map(_is_of_experts, chain)) != apart:
            own, with_rest = "in groups of parameters of their own", "in those of the rest"
            has, needs = (with_rest, own) if apart else (own, with_rest)
            raise ReshardError(
                f"--optimizer {self.args['optimizer']} has experts {has} at the layout of the training, and {needs} at "
                f"this one: keep an EP of 1 or one above 1, or pass --without-optimizer for the weights alone"
            )
        return self.common


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups of parameters of one optimizer, as its state dict has them: in that of the optimizer
    that it wraps, but for one of fp32 parameters. Raises ReshardError if it has none."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ReshardError(
            "the training has an optimizer without groups of parameters: pass --without-optimizer for the weights alone"
        )
    return groups


def _with_groups(optimizer: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    if "optimizer" in optimizer:
        return optimizer | {"optimizer": optimizer["optimizer"] | {"param_groups": groups}}
    return optimizer | {"param_groups": groups}


def _is_of_experts(optimizer: Any) -> bool:
    """Return True for the optimizer of experts whose ranks are others than those of the rest."""
    return any(group.get("is_expert_parallel") for group in _groups(optimizer))


def _joined(dense: dict[str, Any], of_experts: dict[str, Any]) -> dict[str, Any]:
    """Return the one optimizer of all parameters, with the groups of both."""
    groups = list(_groups(dense))
    for group in _groups(of_experts):
        as_dense = group | {"is_expert_parallel": False}
        groups += [as_dense] if as_dense not in groups else []
    return _with_groups(dense, groups)


def _of_experts(optimizer: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return the optimizer of the experts of one that had all parameters: without the group of
    biases and norms, which has no weight decay, unless experts have biases."""
    has_biases = any(
        row.of_experts and row.megatron.endswith("bias") for block in model.blocks() for row in block.rows
    )
    groups = [
        g | {"is_expert_parallel": True} for g in _groups(optimizer) if has_biases or g.get("wd_mult") != 0
    ]
    return _with_groups(optimizer, groups)
