"""Real Megatron models with their optimizers on a CPU: trained, saved and resumed by Megatron-LM's own
`save_checkpoint` and `load_checkpoint`."""

import contextlib
import io
from typing import Any

import megatron.core.parallel_state as mpu
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.training import checkpointing
from megatron.training.checkpointing import load_checkpoint, save_checkpoint

from tests.on_cpu import megatron_on_cpu
from tests.on_cpu.hybrid_on_cpu import as_hybrid
from tests.on_cpu.live_megatron_on_cpu import UNTOUCHED, spoil, unlike

try:
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
except ImportError:  # before 0.18
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    def destroy_moe_metrics_tracker() -> None:
        get_moe_layer_wise_logging_tracker().clear()


def without_steps() -> None:
    """The distributed optimizer's loader takes each state from the checkpoint; the steps, which torch's Adam has as
    states, and Transformer Engine's has not, come with the groups of parameters."""
    plain = DistributedOptimizer._set_main_param_and_optimizer_states
    if plain.__name__ == "set_states":
        return

    def set_states(self, parameter, tensors):
        plain(self, parameter, {"step": None} | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def training_step(wrapped: list[torch.nn.Module], optimizer: Any, vocabulary: int) -> float:
    """Forward, backward and an update of a model under DDP, on random tokens; the loss."""
    tokens = torch.randint(0, vocabulary, (2, 17))
    inputs, labels, n = tokens[:, :-1], tokens[:, 1:].contiguous(), tokens.shape[1] - 1
    positions, mask = (
        torch.arange(n)[None].expand_as(inputs),
        torch.ones(n, n, dtype=torch.bool).triu(1)[None, None],
    )
    [model] = wrapped
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(inputs, positions, mask, labels=labels).mean()
    loss.backward()
    model.finish_grad_sync(force_all_reduce=True)
    _allreduce_non_tensor_model_parallel_grads([model], model.config, mpu.get_tensor_model_parallel_group())
    # As its `step` does, but for the norm of the gradients, which is summed up on a GPU.
    assert not optimizer.prepare_grads() and optimizer.step_with_ready_grads()
    return float(loss.detach())


@contextlib.contextmanager
def saved_in(states_format: str):
    """Save in an earlier format of the distributed optimizer while the context is open."""
    plain = checkpointing._build_sharded_state_dict_metadata
    named = {"distrib_optim_sharding_type": states_format}
    checkpointing._build_sharded_state_dict_metadata = lambda *a, **k: plain(*a, **k) | named
    try:
        yield
    finally:
        checkpointing._build_sharded_state_dict_metadata = plain


class Training:
    """A model under Megatron's DDP with its optimizer and its schedule, as Megatron-LM has them."""

    def __init__(self, flags: list[str]) -> None:
        without_steps()
        torch.cuda.current_stream = lambda *_: None  # asked for before gradients are reduced
        if mpu.model_parallel_is_initialized():
            torch.distributed.barrier()  # all have made the groups that now end
            mpu.destroy_model_parallel()
            megatron_on_cpu.unset_num_microbatches_calculator()
            destroy_moe_metrics_tracker()  # whose size is the number of layers
        self.models, self.args = megatron_on_cpu.build(flags, parallel_output=True)
        distributed, self.args.no_load_optim = self.args.use_distributed_optimizer, False
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=False)
        self.wrapped = [
            DistributedDataParallel(model.config, ddp, Float16Module(model.config, model.bfloat16().train()))
            for model in self.models
        ]
        config = OptimizerConfig(optimizer=self.args.optimizer, lr=1e-2, min_lr=1e-3, bf16=True, clip_grad=0.0,
                                 use_distributed_optimizer=distributed)  # fmt: skip
        plain_type = torch.Tensor.type  # it takes parameters on a GPU only
        torch.Tensor.type = lambda self, *a, **k: (
            plain_type(self, *a, **k) if a else f"torch.cuda.{plain_type(self).rpartition('.')[2]}"
        )
        groups = get_standard_config_overrides(config)  # norms without weight decay
        self.optimizer = get_megatron_optimizer(config, self.wrapped, groups)
        torch.Tensor.type = plain_type
        rates = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2, "lr_decay_steps": 20}
        decay = {"start_wd": 0.01, "end_wd": 0.1, "wd_incr_steps": 20, "wd_incr_style": "linear"}
        self.schedule = OptimizerParamScheduler(self.optimizer, lr_decay_style="linear", **rates, **decay)

    def load(self, directory: str, finetune: bool = False) -> int:
        """Megatron-LM's ``--load DIRECTORY``, of the weights alone to `finetune`; the iteration."""
        self.args.load, self.args.finetune = directory, finetune
        self.schedule.num_steps = 0  # to which those of the checkpoint are added
        if not finetune:
            self.start()
        with contextlib.redirect_stdout(io.StringIO()):
            iteration, _ = load_checkpoint(self.wrapped, self.optimizer, self.schedule, strict=True)
        for each in self.optimizer.chained_optimizers:
            for state in each.optimizer.state.values():
                # The distributed optimizer's loader gives one tensor to all of them.
                if "step" in state:  # of Adam
                    state["step"] = state["step"].clone()
        return iteration

    def start(self) -> None:
        """Make the states that torch's Adam makes in its first step, and Megatron's loader expects."""
        of_adam = (o for o in self.optimizer.chained_optimizers if isinstance(o.optimizer, torch.optim.Adam))
        for each in of_adam:
            for p in (p for group in each.optimizer.param_groups for p in group["params"]):
                if not each.optimizer.state[p]:
                    zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    each.optimizer.state[p] = {"step": torch.tensor(0.0)} | zeros

    def save(self, directory: str, iteration: int, states_format: str = "") -> None:
        """Megatron-LM's ``--save DIRECTORY``; with `states_format` in a format of earlier versions, of which it has
        no flag any more."""
        self.args.save, self.args.consumed_train_samples = directory, 4 * iteration
        earlier = saved_in(states_format) if states_format else contextlib.nullcontext()
        with earlier, contextlib.redirect_stdout(io.StringIO()):
            save_checkpoint(iteration, self.wrapped, self.optimizer, self.schedule, 1.5)

    def step(self, number: int) -> float:
        """Forward, backward and an update, on tokens of this data parallel rank and step; the loss."""
        torch.manual_seed(100 * number + mpu.get_data_parallel_rank())
        loss = training_step(self.wrapped, self.optimizer, vocabulary=1000)
        self.schedule.step(2)
        return loss

    def states(self) -> dict[str, torch.Tensor]:
        """This rank's main parameters and all that the optimizer has of them, by their place."""
        found = {}
        for i, each in enumerate(self.optimizer.chained_optimizers):
            for j, group in enumerate(each.optimizer.param_groups):
                for k, p in enumerate(group["params"]):
                    state = {"main": p.detach(), **each.optimizer.state[p]}
                    found |= {
                        f"{i}.{j}.{k}.{name}": t.clone() for name, t in state.items() if torch.is_tensor(t)
                    }
        return found

    def spoil(self) -> None:
        """Put numbers into all of it that no training has."""
        spoil(self.models)
        for each in self.optimizer.chained_optimizers:
            for p in (p for group in each.optimizer.param_groups for p in group["params"]):
                for t in (p.data, *(t for t in each.optimizer.state[p].values() if torch.is_tensor(t))):
                    t.fill_(UNTOUCHED)


def train(
    rank: int, flags: list[str], source: str, directory: str, before: int, after: int, states_format: str = ""
) -> list[float]:
    """Train on a checkpoint's weights, save after so many steps, and go on undisturbed; all losses."""
    training = Training(flags)
    training.load(source, finetune=True)
    losses = [training.step(number) for number in range(before)]
    training.save(directory, before, states_format)
    return losses + [training.step(number) for number in range(before, before + after)]


def train_each(rank: int, runs: list[tuple]) -> list[list[float]]:
    """Several trainings, one after the other; the losses of each."""
    return [train(rank, *run) for run in runs]


def resume(rank: int, cases: list[tuple[list[str], str, list[str], int, str]]) -> list[list[tuple]]:
    """For each of these flags, of a HybridModel where there is a pattern, with directories, a number of
    steps, and a directory or none: what Megatron loads of each directory, held against what it loads of the
    first. The iteration, the names that differ, how many there are, the places in the schedule and in the
    samples, and the losses of these steps from there on. What was loaded of the first is saved again."""
    said = []
    for flags, pattern, directories, steps, saved in cases:
        training, of_case = Training(as_hybrid(flags, pattern) if pattern else flags), []
        expected: dict[str, torch.Tensor] = {}
        for directory in directories:
            if expected:
                training.spoil()
            iteration = training.load(directory)
            loaded = megatron_on_cpu.weights(training.models) | training.states()
            if saved and not expected:
                training.save(saved, iteration)
            expected = expected or loaded
            places = training.schedule.num_steps, training.args.consumed_train_samples
            losses = [training.step(number) for number in range(iteration, iteration + steps)]
            of_case.append((iteration, unlike(loaded, expected), len(loaded), places, losses))
        said.append(of_case)
    return said
