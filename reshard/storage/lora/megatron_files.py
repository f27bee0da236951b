"""A LoRA adapter's Megatron ``torch_dist`` checkpoint, laid out before a byte is written."""

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Placement
from reshard.core.planner import make_plan
from reshard.core.views import tensor_of
from reshard.formats import torch_dist
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file
from reshard.lora.parameters import (
    Adapter,
    AdapterForm,
    adapter_parameters,
    linear_layers,
    other_layers,
    part_names,
)
from reshard.lora.peft_config import CONFIG
from reshard.lora.scale import most_common
from reshard.megatron.checkpoint import Chunk, chunks_to_write
from reshard.megatron.layout import MegatronLayout
from reshard.storage.destinations.base import Destination
from reshard.storage.destinations.rank_files import RankFiles
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.lora.source import AdapterSource
from reshard.storage.manifest import printable
from reshard.storage.sources.paths import HF_FILES, RUN_CONFIG

# What Megatron-Bridge reads when it loads a checkpoint, besides the adapter's settings.
_RUN_CONFIG = """peft:
  _target_: {target}
  dim: {rank}
  alpha: {alpha}
  target_modules: {modules}
  share_expert_adapters: {shared}
model:
  tensor_model_parallel_size: {tp}
  pipeline_model_parallel_size: 1
checkpoint:
  save_optim: false
  save_rng: false
  fully_parallel_save: false
"""


class MegatronAdapterFiles(Destination):
    """The matrices of an adapter in this `form`, whole, in one file of one rank: any layout loads them.

    `copies` are A's that Megatron holds once. Raises ReshardError if the form cannot hold the adapter.
    """

    format = "megatron adapter"

    def __init__(
        self, source: AdapterSource, tensors: dict[str, TensorInfo], form: AdapterForm, iteration: int
    ) -> None:
        self.form, self.source, self.iteration = form, source, iteration
        for weight in (name for a in source.adapters if a.layer.first.layer is None for name in a.ranks):
            raise ReshardError(
                f"{source.path} has an adapter of {weight}, and {form.name} has none of the output layer: "
                "train without, or add it to the model with reshard lora-merge"
            )
        others = {layer.first.name for layer in other_layers(source.base)}
        for weight in (name for a in source.adapters if a.layer.first.name in others for name in a.ranks):
            raise ReshardError(
                f"{source.path} has an adapter of {tensor_of(weight)}, which {form.name} has no adapter "
                "for: train without, or add it to the model with reshard lora-merge"
            )
        self.rank, self.alpha, self.rslora = trainer_settings(source, form)
        adapters = _completed(source, self.rank)
        mapping = adapter_parameters(adapters, form)
        self.stored, self.copies, self.parameters = tensors, mapping.copies, mapping.parameters
        self.directory = f"iter_{iteration:07d}"
        layout = MegatronLayout()
        chunks = list(chunks_to_write(source.model, mapping, layout, "transformer_engine"))
        _check_stacked(chunks, source)
        shapes = {name: info.shape for name, info in tensors.items() if name not in self.copies}
        self.plan = make_plan(Placement.canonical(shapes), Placement.of(shapes, (c.tensor for c in chunks)))
        self.rank_files = RankFiles(self.directory, f"{self.directory}/", chunks, (), tensors)
        self.sizes = self.rank_files.sizes()
        if form.adapter is None and self._of_experts():
            source.notices.append(
                "each expert has an adapter of its own: load them with share_expert_adapters=False"
            )

    @cached_property
    def strips(self) -> dict[str, list[Strip]]:
        return self.rank_files.strips(self.plan)

    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        self.rank_files.write_containers(root, names, files)

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        return {"format": self.format, "family": family, "source": printable(source), "iteration": self.directory,
                "adapter_format": self.form.name, "base_model": self.source.base_name}  # fmt: skip

    def small_files(self) -> dict[str, bytes | str]:
        within = f"{self.directory}/"
        args: dict[str, Any] = {"lora_rank": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rslora}
        if self.form.adapter is not None:
            args["tensor_model_parallel_size"] = self.form.swiglu_ranks
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        small: dict[str, bytes | str] = {
            f"{within}common.pt": torch_dist.common_bytes(args, self.iteration, content),
            f"{within}metadata.json": json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}),
            f"{within}.metadata": self.rank_files.metadata(),
            torch_dist.TRACKER: str(self.iteration),
        }  # fmt: skip
        beside = self.source.hf_files()
        if "config.json" in beside:
            small[f"{HF_FILES}/config.json"] = read_file(beside["config.json"], MAX_COPIED_BYTES)
        if self.form.adapter is None:
            return small | {f"{within}{RUN_CONFIG}": self._run_config()}
        return small | {CONFIG: json.dumps(self._peft_config(), indent=2) + "\n"}

    def entries(self) -> dict[str, dict[str, Any]]:
        return self.rank_files.entries()

    def _run_config(self) -> str:
        target = "canonical_lora.CanonicalLoRA" if self.form.canonical else "lora.LoRA"
        return _RUN_CONFIG.format(
            target=f"megatron.bridge.peft.{target}", rank=self.rank,
            alpha=self.alpha, tp=self.form.swiglu_ranks, shared=str(not self._of_experts()).lower(),
            modules=json.dumps(sorted(self._bridge_modules())),
        )  # fmt: skip

    def _of_experts(self) -> bool:
        """Return True if experts have adapters, each its own."""
        return any(adapter.layer.of_experts for adapter in self.source.adapters)

    def _bridge_modules(self) -> set[str]:
        """Return Megatron-Bridge's names of the layers with an adapter, in any of the model's layers."""
        names = set()
        for adapter in self.source.adapters:
            module = adapter.layer.module.rpartition(".")[2]
            kinds = [part.removeprefix("adapter_") for part in self._parts(adapter)]
            fused = {"q", "k", "v"}.issuperset(kinds)
            names.update([f"linear_{k}" if fused else f"{module}_{k}" for k in kinds] or [module])
        return names

    def _parts(self, adapter: Adapter) -> list[str]:
        """Return CanonicalLoRA's names of the parts of a layer that it targets one by one."""
        if not self.form.canonical or len(adapter.layer.published()) == 1:
            return []
        return part_names(adapter.layer)

    def _peft_config(self) -> dict[str, Any]:
        """Return PEFT's config as mcore-bridge reads it: with Megatron's names of the layers."""
        modules = sorted({adapter.layer.module.rpartition(".")[2] for adapter in self.source.adapters})
        ranks = {
            f"{adapter.layer.first.prefix}{adapter.layer.first.layer}.{adapter.layer.module}": rank
            for adapter in self.source.adapters
            for rank in adapter.ranks.values()
            if rank != self.rank
        }
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rslora,
                "lora_dropout": 0.0, "bias": "none", "target_modules": modules, "rank_pattern": ranks,
                "base_model_name_or_path": self.source.base_name}  # fmt: skip


def _completed(source: AdapterSource, rank: int) -> list[Adapter]:
    """Return the adapters of the source, with zeros of this rank for what has none, and for each module with one
    in some layers such in the others, which Megatron stacks with them."""
    own = {adapter.layer: replace(adapter, missing_rank=rank) for adapter in source.adapters}
    if not source.model.uniform:
        return list(own.values())
    modules = {layer.module for layer in own if not layer.first.mtp}
    layers = [
        layer
        for layer in linear_layers(source.base)
        if layer in own or (layer.module in modules and not layer.first.mtp)
    ]
    if len(layers) > len(own):
        source.notices.append(
            f"{len(layers) - len(own)} layers without an adapter get zeros, since Megatron has one in all "
            "layers of a kind"
        )
    return [own.get(layer, Adapter(layer, {}, missing_rank=rank)) for layer in layers]


def _check_stacked(chunks: list[Chunk], source: AdapterSource) -> None:
    """Raise ReshardError if layers or experts that Megatron stacks have adapters of different ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        if shapes.setdefault(chunk.key, chunk.key_shape) != chunk.key_shape:
            raise ReshardError(
                f"{source.path} has different ranks in the layers that Megatron stacks as {chunk.key}: "
                f"{list(shapes[chunk.key])} and {list(chunk.key_shape)}"
            )


def trainer_settings(source: AdapterSource, form: AdapterForm) -> tuple[int, float, bool]:
    """Return the one rank, alpha and kind of scale that a trainer has for all layers.

    Raises ReshardError if the layers have several: a trainer would compute another model.
    """
    scales = list(source.scales.values())
    rank = int(most_common(scale.rank for scale in scales))
    rslora = all(scale.rslora for scale in scales)
    if form.adapter is None:
        alphas, rslora = {scale.factor * scale.rank for scale in scales}, False
    else:
        alphas = {scale.alpha for scale in scales}
    if len(alphas) > 1 or (form.adapter is not None and len({scale.rslora for scale in scales}) > 1):
        values = listed([f"{alpha:g}" for alpha in sorted(alphas)], 4)
        raise ReshardError(
            f"{source.path} has several alphas ({values}), and {form.name} has one for all layers"
        )
    ranks = {source.scales[name].rank for a in source.adapters if not a.layer.of_experts for name in a.ranks}
    if form.adapter is None and len(ranks) > 1:
        raise ReshardError(
            f"{source.path} has adapters of ranks {listed(sorted(ranks), 4)}, and Megatron-Bridge has one rank for all "
            f"layers but experts"
        )
    rank = ranks.pop() if len(ranks) == 1 else rank
    alpha = alphas.pop()
    return rank, int(alpha) if alpha == int(alpha) else alpha, rslora
