"""Megatron-Core as a system: a checkpoint of any layout, loaded by its own loader into its own
modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line, listed
from reshard.formats.torch_dist import Checkpoint
from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
from reshard.megatron.gtp import WITHOUT_GTP
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model
from reshard.parity.systems.base import DTYPES, ForwardSystem
from reshard.parity.systems.processes import (
    check_processes,
    device,
    gather_from_ranks,
    join_processes,
    release_memory,
)
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import open_source


class Megatron(ForwardSystem):
    """A Megatron checkpoint, loaded by Megatron-Core's own code into its own modules, at any
    layout.

    Under torchrun every rank makes one; the ranks of the last pipeline stage return the logits.
    """

    def __init__(self, path: Path, dtype: str, layout: MegatronLayout, hf_config: Path | None = None) -> None:
        self.hf_config = hf_config
        self.model, self.model_class, checkpoint = self._inspect(path)
        self.name = f"Megatron-Core, {path}, {layout}, {dtype}"
        join_processes()
        check_processes(str(layout), layout.world_size(self.model), replicas=True)
        impl = "transformer_engine" if device().type == "cuda" else "local"
        with without_gpu():
            initialize_parallel(layout)
        try:
            with without_gpu():
                self.models = build_megatron(
                    self.model,
                    layout,
                    transformer_impl=impl,
                    model_class=self.model_class,
                    dtype=DTYPES[dtype],
                    parallel_output=False,
                )
                # Not all is made on the GPU: a router moves its weight there when it first runs.
                self.models = [m.to(device(), DTYPES[dtype]).eval() for m in self.models]
            self._load(checkpoint)
        except BaseException:
            self.close()
            raise

    def _inspect(self, path: Path) -> tuple[Model, str, Checkpoint]:
        """Read a checkpoint's model, its class and keys with our own reader, before Megatron's loader, which
        runs pickles, opens it."""
        source = open_source(path, self.hf_config)
        try:
            if not isinstance(source, MegatronSource):
                raise ReshardError(f"{path} is not a Megatron checkpoint")
            if source.gtp != WITHOUT_GTP:
                raise ReshardError(
                    f"{path} was saved under GTP, of which Megatron's loader gets other gates and ups in a model "
                    f"without: convert it by mcore-to-mcore first, without --gtp and --egtp"
                )
            return source.model, source.model_class, source.checkpoint
        finally:
            source.close()

    def load(self, path: Path) -> None:
        """Load the weights of another checkpoint of the model with Megatron-Core's own loader.

        Raises ReshardError if a parameter is missing, or the checkpoint is of another class of
        Megatron's models.
        """
        _, model_class, checkpoint = self._inspect(path)
        if model_class != self.model_class:
            raise ReshardError(
                f"{path} is of a model of class {model_class}, but {self.name} is of class {self.model_class}"
            )
        self._load(checkpoint)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's weights. Local and Transformer Engine layers name some parameters
        differently; both are read."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException

        directory, keys = checkpoint.directory, checkpoint.keys
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state: dict[str, Any] = {}
        for index, chunk in enumerate(self.models):
            model: Any = chunk
            state[f"model{index}"] = model.sharded_state_dict(metadata=metadata)
            for name, entry in list(state[f"model{index}"].items()):
                if "_extra_state" in name:
                    del state[f"model{index}"][name]  # carries no weight; local layers have none
                elif entry.key not in keys:
                    entry.key = next(
                        (other for other in self._other_names(entry.key) if other in keys), entry.key
                    )
        try:
            with without_gpu():
                loaded = dist_checkpointing.load(state, str(directory))
        except CheckpointException as error:
            reasons = [failure[0] for failure in error.failures.values()]
            raise ReshardError(f"Megatron-Core cannot load {directory}: {first_line(reasons[0])}") from error
        except (CheckpointingException, RuntimeError, ValueError, KeyError) as error:
            raise ReshardError(f"Megatron-Core cannot load {directory}: {first_line(error)}") from error
        for index, chunk in enumerate(self.models):
            missing, unexpected = chunk.load_state_dict(loaded[f"model{index}"], strict=False)
            differing = [name for name in (*missing, *unexpected) if "_extra_state" not in name]
            if differing:
                raise ReshardError(
                    f"{directory} and the model that Megatron-Core builds differ in "
                    f"{listed(sorted(differing), 3)}"
                )

    def _other_names(self, key: str) -> Iterator[str]:
        """Yield the names of a key in a checkpoint of the other kind of layers."""
        for name, local in self.model.family.local_names.items():
            for own, other in ((local, name), (name, local)):
                if key.endswith("." + own):
                    yield key.removesuffix(own) + other

    def close(self) -> None:
        from megatron.core import parallel_state

        self.models = []
        parallel_state.destroy_model_parallel()
        release_memory()

    def roots(self) -> Sequence[torch.nn.Module]:
        return self.models

    def logits(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        with _rotary_positions(self.models, positions):
            return self._logits(tokens, lengths)

    def _logits(self, tokens: torch.Tensor, lengths: Sequence[int] | None) -> torch.Tensor | None:
        from megatron.core import parallel_state

        stages, stage = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(batch, length)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        packing = {} if lengths is None else {"packed_seq_params": _packed(lengths, tokens.device)}
        out = None
        last = len(self.models) * stages - 1
        with without_gpu():
            for index in range(last + 1):
                if index % stages != stage:
                    continue
                model: Any = self.models[index // stages]
                if index:
                    hidden = out
                    if stages > 1:
                        hidden = torch.empty(
                            length,
                            batch,
                            model.config.hidden_size,
                            dtype=model.config.params_dtype,
                            device=tokens.device,
                        )
                        dist.recv(hidden, ranks[(index - 1) % stages])
                    model.set_input_tensor(hidden)
                out = model(tokens, positions, mask, **packing)
                if index < last and stages > 1:
                    dist.send(out.contiguous(), ranks[(index + 1) % stages])
        return out[..., : self.model.symbols["V"]] if out is not None and stage == stages - 1 else None

    def _layers(self) -> list[Any]:
        return [
            layer
            for chunk in self.models
            for layer in chunk.decoder.layers  # type: ignore[union-attr, operator]
        ]

    def routers(self) -> dict[int, torch.nn.Module]:
        return {
            self.decoder_layer(layer): layer.mlp.router
            for layer in self._layers()
            if hasattr(getattr(layer, "mlp", None), "router")
        }

    def indexers(self) -> dict[int, torch.nn.Module]:
        return {
            self.decoder_layer(layer): module
            for layer in self._layers()
            for module in layer.modules()
            if getattr(module, "indexer", None) is not None
        }

    def decoder_layer(self, layer: Any) -> int:
        """Return the number of the published decoder layer that one of Megatron's layers is, or is half
        of."""
        halves = self.model_class == "hybrid" and not self.model.family.layer_letters
        return (layer.layer_number - 1) // (2 if halves else 1)

    def choices(self, router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        length, batch = inputs[0].shape[:2]
        scores = router.gating(inputs[0]).float().view(length, batch, -1)
        if router.config.moe_router_score_function == "sigmoid":
            scores = scores.sigmoid()
        if router.expert_bias is not None:
            scores = scores + router.expert_bias.float()
        taken = output[1].view(length, batch, -1)
        experts = taken.nonzero()[:, 2].view(length, batch, -1)
        return experts.transpose(0, 1), scores.transpose(0, 1)

    def gather_choices(self, recorded: dict[int, Any]) -> dict[int, Any]:
        return gather_from_ranks(recorded)


@contextmanager
def _rotary_positions(models: Sequence[torch.nn.Module], positions: Sequence[int] | None) -> Iterator[None]:
    """Let rotary embeddings rotate the tokens of a prompt as at these positions while the context
    is open: Megatron-Core counts positions itself and takes none."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if positions is None:
        yield
        return
    rows = torch.tensor(positions)

    def lengthen(module: Any, inputs: Any) -> Any:
        return (max(positions) + 1, *inputs[1:])

    def select(module: Any, inputs: Any, output: Any) -> Any:
        angles, *rest = output if isinstance(output, tuple) else (output,)
        selected = angles.index_select(0, rows.to(angles.device))
        return (selected, *rest) if isinstance(output, tuple) else selected

    handles = []
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, RotaryEmbedding):
            handles += [
                module.register_forward_pre_hook(lengthen),
                module.register_forward_hook(select),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _packed(lengths: Sequence[int], device: torch.device) -> Any:
    """Return the ``PackedSeqParams`` of prompts one after the other in a batch of one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if device.type != "cuda":
        raise ReshardError(
            "Megatron-Core's layers for machines without a GPU cannot run packed prompts: leave out --packed"
        )
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
