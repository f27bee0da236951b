"""A Megatron ``torch_dist`` checkpoint, laid out before a byte is written."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.core.placement import Placement
from reshard.core.planner import make_plan
from reshard.formats import safetensors, torch_dist
from reshard.formats.small_files import MAX_COPIED_BYTES, read_file
from reshard.megatron.arguments import arguments, checkpoint_args
from reshard.megatron.checkpoint import chunks_to_write, extra_states_to_write
from reshard.megatron.flags import FLAGS_FILE, command_line
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import PADDING, expand, padded_vocab_size
from reshard.megatron.training.progress import TrainingState
from reshard.megatron.training.states import state_chunks
from reshard.models.family import with_model_classes
from reshard.models.model import Model
from reshard.storage.destinations.base import Destination
from reshard.storage.destinations.rank_files import RankFiles
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, strips_of_view
from reshard.storage.manifest import file_entry, printable
from reshard.storage.sources.base import has_tokenizer
from reshard.storage.sources.paths import HF_FILES, TOWERS


class MegatronFiles(Destination):
    """A ``torch_dist`` checkpoint of canonical `tensors` at a layout.

    `copies` are tensors that are not stored, `beside` the files for its ``hf/``, `model_class` the class of
    Megatron's model that loads it. With `alone` it is
    the directory of an iteration, which has all of that in itself. With `training` some tensors are
    optimizer states, and a run goes on from there. Raises ReshardError for a
    layout, or a version of Megatron-LM, that the model does not go with.
    """

    format = "megatron torch_dist"
    has_slow_files = True  # thousands of objects to pickle

    def __init__(
        self,
        model: Model,
        layout: MegatronLayout,
        tensors: dict[str, TensorInfo],
        copies: Mapping[str, str],
        beside: Mapping[str, Path],
        *,
        transformer_impl: str,
        make_vocab_size_divisible_by: int,
        iteration: int | None,
        megatron_lm: tuple[int, int],
        model_class: str,
        alone: bool = False,
        training: TrainingState | None = None,
    ) -> None:
        layout.check(model)
        self.model, self.layout, self.beside = model, layout, beside
        self.transformer_impl, self.iteration, self.model_class = transformer_impl, iteration, model_class
        vocab = padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, layout.tp)
        kept = next((t.shape[0] for n, t in tensors.items() if n.startswith(PADDING)), 0)
        mapping = expand(model, transformer_impl, vocab, model_class, kept)
        chunks = list(chunks_to_write(model, mapping, layout, transformer_impl))
        chunks += state_chunks(chunks, tensors)
        self.training, self.megatron_lm = training, megatron_lm
        towers = {n: (t.dtype, t.shape) for n, t in tensors.items() if model.is_of_tower(n)}
        self.towers = safetensors.plan_file(towers, f"{HF_FILES}/{TOWERS}") if towers else None
        shapes = {n: t.shape for n, t in tensors.items() if n not in copies and n not in towers}
        self.plan = make_plan(Placement.canonical(shapes), Placement.of(shapes, (c.tensor for c in chunks)))
        self.stored = {
            name: replace(info, dtype=info.dtype.held(name in mapping.less_1))
            for name, info in tensors.items()
        }
        self.directory = "release" if iteration is None else f"iter_{iteration:07d}"
        states = extra_states_to_write(model, mapping, layout, transformer_impl)
        self.within = "" if alone else f"{self.directory}/"
        self.rank_files = RankFiles(self.directory, self.within, chunks, states, tensors)
        self.sizes = self.rank_files.sizes()
        if self.towers is not None:
            self.sizes[self.towers.name] = self.towers.size_bytes
        self.dtype = tensors[next(iter(tensors))].dtype
        self.args = arguments(
            model, layout, vocab, make_vocab_size_divisible_by, self.dtype, transformer_impl, model_class
        )
        self.flags = command_line(self.args, megatron_lm, has_tokenizer(beside))

    @cached_property
    def strips(self) -> dict[str, list[Strip]]:
        strips = self.rank_files.strips(self.plan)
        for name, tensor in self.towers.tensors.items() if self.towers is not None else ():
            where = (Path(tensor.file), tensor.offset, tensor.dtype.size)
            strips[name] = strips_of_view(name, tensor.shape, *where)
        return strips

    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        self.rank_files.write_containers(root, names, files)
        if self.towers is not None and self.towers.name in names:
            files.write(root / self.towers.name, 0, self.towers.head)

    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        return {"format": self.format, "family": family, "source": printable(source), "layout": asdict(self.layout),
                "world_size": self.layout.world_size(self.model), "transformer_impl": self.transformer_impl,
                "model_class": self.model_class, "iteration": self.directory, "quantized": quantized}  # fmt: skip

    def slow_files(self) -> dict[str, bytes]:
        return {f"{self.within}.metadata": self.rank_files.metadata()}

    def small_files(self) -> dict[str, bytes | str]:
        iteration = self.iteration or 0
        saved = checkpoint_args(self.args, self.layout.world_size(self.model), self.dtype, iteration)
        content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        others: dict[str, Any] = {}
        storages: dict[str, bytes] = {}
        if self.training is not None:
            saved, content = self.training.args_for(saved), content | self.training.content_metadata
            others = self.training.common_for(self.model, self.layout, self.megatron_lm)
            storages = self.training.storages
        small: dict[str, bytes | str] = {
            f"{self.within}common.pt": torch_dist.common_bytes(saved, iteration, content, others, storages),
            f"{self.within}metadata.json": json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}),
            FLAGS_FILE: "\n".join(self.flags) + "\n",
        }  # fmt: skip
        if self.within:
            small[torch_dist.TRACKER] = "release" if self.iteration is None else str(iteration)
        beside = {name: read_file(path, MAX_COPIED_BYTES) for name, path in self.beside.items()}
        if "config.json" in beside:
            beside["config.json"] = with_model_classes(beside["config.json"])
        return small | {f"{HF_FILES}/{name}": data for name, data in beside.items()}

    def entries(self) -> dict[str, dict[str, Any]]:
        entries = self.rank_files.entries()
        if self.towers is not None:
            size, head = self.towers.size_bytes, self.towers.head
            entries[self.towers.name] = file_entry(size, [head], around_tensors=True)
        return entries
