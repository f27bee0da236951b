"""A trainer for benchmarks: Megatron's modules under its DDP, with its distributed optimizer, and
one step of theirs."""

import contextlib
from collections.abc import Sequence

import torch

from benchmarks.processes import device


class Training:
    """This rank's chunks, wrapped and with an optimizer (without a GPU: local layers and no
    optimizer, which takes parameters on a GPU only). `options` are fields of Megatron's config."""

    def __init__(self, model, layout, **options) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from reshard.megatron.build import build_megatron

        gpu = device() == "cuda"
        if model.num_experts:
            options |= {"moe_token_dispatcher_type": "alltoall" if gpu else "allgather"}
        options |= {"deallocate_pipeline_outputs": layout.pp > 1}  # as Megatron-LM's arguments say
        implementation = "transformer_engine" if gpu else "local"
        chunks = build_megatron(model, layout, transformer_impl=implementation, **options)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=gpu, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        )
        self.vocabulary, self.config = model.symbols["V"], chunks[0].config
        self.wrapped = [
            DistributedDataParallel(self.config, ddp, Float16Module(self.config, chunk.to(device())))
            for chunk in chunks
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = None
        if gpu:
            settings = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=True)
            # Gloo's groups are for checkpoints.
            self.optimizer = get_megatron_optimizer(settings, self.wrapped, use_gloo_process_groups=False)

    def passes(self, seq_length: int, microbatches: int = 1, shared: int = 1) -> None:
        """Gradients of random tokens, a sequence at a time, of which each of `shared` ranks has a part."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        inputs = self._inputs(seq_length // shared)

        def forward(_, chunk):
            return chunk(*inputs, labels=inputs[0]), lambda losses: (losses.float().mean(), {})

        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        several = len(self.wrapped) > 1
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=[None] * len(self.wrapped) if several else None,
            model=self.wrapped if several else self.wrapped[0], num_microbatches=microbatches, seq_length=seq_length,
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip

    def logprobs(self, seq_length: int) -> torch.Tensor:
        """Of random tokens, ``[1, seq_length]``, by the whole model in one chunk, without gradients."""
        inputs = self._inputs(seq_length)
        [chunk] = self.wrapped
        with torch.no_grad():
            return -chunk(*inputs, labels=inputs[0])

    def _inputs(self, length: int) -> tuple:
        """Tokens, positions and, where the layers do not make it, the mask."""
        torch.manual_seed(1)
        tokens = torch.randint(0, self.vocabulary, (1, length), device=device())
        positions = torch.arange(length, device=device())[None]
        if device() == "cuda":
            return tokens, positions, None
        return tokens, positions, torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def has_gradients(self) -> bool:
        """Whether every buffer of gradients has some."""
        return all(
            bool(buffer.grad_data.abs().sum() > 0) for chunk in self.wrapped for buffer in chunk.buffers
        )

    def free(self) -> None:
        """Megatron keeps what it has trained alive, by hooks and lists of its own: give the memory
        back by hand."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def _tensors(self) -> Sequence[torch.Tensor]:
        tensors = [p.data for chunk in self.wrapped for p in chunk.parameters()]
        tensors += [
            buffer.grad_data
            for chunk in self.wrapped
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            tensors += [p.data for group in one.optimizer.param_groups for p in group["params"]]
            states = [value for state in one.optimizer.state.values() for value in state.values()]
            tensors += [value for value in states if isinstance(value, torch.Tensor)]
        return tensors


def fusion_is_there() -> bool:
    """Whether Megatron can add to gradients while it multiplies, which its output layer needs Apex for."""
    if device() == "cpu":
        return False
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def fused(model) -> dict:
    """Fields of Megatron's config for a GPU: what is usually switched on."""
    if device() == "cpu":
        return {}
    found = {
        "cross_entropy_loss_fusion": True,
        "gradient_accumulation_fusion": fusion_is_there(),
        "bias_activation_fusion": True,
    }
    return found | ({"moe_permute_fusion": True} if model.num_experts else {})


def _without_device(plain):
    return lambda *a, **k: plain(*a, **(k | {"device": None} if k.get("device") == "cuda" else k))


@contextlib.contextmanager
def on_cpu():
    """Megatron's schedules ask for a GPU by name: without one, what is made inside is made on the CPU. For a
    rehearsal."""
    from unittest.mock import patch

    from megatron.core.tensor_parallel import random as states

    with contextlib.ExitStack() as patches:
        if device() == "cpu":
            for name in ("zeros", "ones", "tensor", "empty"):
                patches.enter_context(patch.object(torch, name, _without_device(getattr(torch, name))))
            patches.enter_context(patch.object(torch.cuda, "current_stream", lambda *a: None))
            patches.enter_context(patch.object(torch.cuda, "synchronize", lambda *a: None))
            patches.enter_context(patch.object(states, "_get_all_rng_states", lambda *a: ()))
            patches.enter_context(patch.object(states, "_set_all_rng_states", lambda *a: None))
        yield
