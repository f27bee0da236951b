"""A ``torch_dist`` checkpoint of Megatron-Core, read as canonical tensors."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Placement
from reshard.core.planner import Plan, PlanError, Transfer, make_plan
from reshard.formats import safetensors, torch_dist
from reshard.lora.checkpoint import base_keys
from reshard.megatron.arguments import check_args, check_family, model_of_args
from reshard.megatron.checkpoint import (
    NOT_WEIGHTS,
    KeyPlacement,
    check_language_model,
    placement_of_keys,
    vocab_rows,
)
from reshard.megatron.fsdp_dtensor import FORMAT, FsdpDtensor, as_torch_dist
from reshard.megatron.gtp import WITHOUT_GTP, Gtp, gtp_of, names_gtp, says_gtp
from reshard.megatron.hybrid import class_of_keys, notices
from reshard.megatron.parameters import PADDING, ModelParameters, expand, padded_vocab_size
from reshard.megatron.towers import as_text_args, of_towers, takes_tower, text_key, with_tower
from reshard.megatron.training.progress import TrainingState
from reshard.megatron.training.states import (
    STATE,
    OptimizerStates,
    check_movable,
    placement_of_states,
    states_of,
)
from reshard.models.model import Model
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo, strip_of, strips_of_view
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import read_manifest
from reshard.storage.run.partial import unfinished
from reshard.storage.sources.base import Source, ignored_as_recorded, read_config
from reshard.storage.sources.beside import unread_beside
from reshard.storage.sources.containers import Containers
from reshard.storage.sources.foreign import check_foreign
from reshard.storage.sources.paths import (
    HF_FILES,
    TOWERS,
    config_beside,
    config_of_args,
    locate,
    model_named,
)
from reshard.storage.sources.run_config import run_configs, section, tower_notices
from reshard.storage.sources.versions import FileVersions

# Which optimizer states are read.
States = Literal["none", "all", "movable", "recorded"]


class UnplacedStatesError(ReshardError):
    """Raised for optimizer states that belong to no parameter of the model, or have other shapes."""


class MegatronSource(Source):
    """A ``torch_dist`` checkpoint of Megatron-Core, whoever wrote it, by its own directory or one
    that a trainer has put it in (`reshard.storage.sources.paths`).

    With `states` its optimizer states are tensors too: ``all`` of them, or none but those that its manifest
    lists (``recorded``), or all if they are in a format that can be moved and each belongs to a parameter of
    the model (``movable``; `unplaced_states` says which does not). Padding of the vocabulary is then read up
    to a multiple of `vocab_multiple`.
    """

    kind = "megatron"
    config_fields: Mapping[str, Any] = MappingProxyType({})  # of the config, where one was read

    def __init__(
        self,
        path: Path,
        hf_config: Path | None = None,
        family: str | None = None,
        without_adapters: bool = False,
        states: States = "none",
        vocab_multiple: int | None = None,
    ) -> None:
        located = locate(path)
        if located is None:
            check_foreign(path)
            raise ReshardError(
                unfinished(path)
                or f"{path} is not a Megatron torch_dist checkpoint: it has neither {torch_dist.TRACKER} nor .metadata"
            )
        self.path, self.located = path, located
        self.hf_config, self.root, directory = hf_config, located.root, located.directory
        self.alone = self.root == directory  # an iteration that has all that belongs to it in itself
        self.versions = FileVersions(directory, self.root, self.root / HF_FILES)
        if hf_config is not None:
            self.versions.record(hf_config)
        self.checkpoint = as_torch_dist(torch_dist.read(directory, located.iteration))
        self.keys = self._chosen_keys(without_adapters)
        taken = list(located.notices)
        self.config_directory: Path | None = None
        own = hf_config is None or hf_config == located.root / HF_FILES
        with ignored_as_recorded(located.root if own else None):
            self.model, self.config_from = self._model(family, taken)
        self.files = OpenFiles()
        self.containers = Containers(self.checkpoint, self.files)
        self.model_class = class_of_keys(self.keys)
        self.gtp = self._gtp()
        self.states = self._states_to_read(states)
        self.vocab_multiple = vocab_multiple
        self.mapping = self._expanded()
        self.unplaced_states: str | None = None  # why states of a movable format are not read after all
        placed = self._placed_with(states)
        self.plan = self._planned(placed)
        self.transfers = self.plan.by_canonical_tensor()
        self.tower_directory, self.towers = self._towers()
        manifest = self.manifest()
        self.experts_packed = (manifest or {}).get("experts_packed", True)
        self.copies = self._copies(manifest)
        self.tensors = self._tensors()
        self.uncast = frozenset(self.state_shapes)
        # what this tool wrote holds weights and empty states only
        self.notices = taken + (placed.notices if manifest is None else [])
        self.notices += self.model.notices + notices(self.model, self.model_class) + self._state_notices()
        self.assumed = tower_notices(self._larger(), list(self.keys), located)
        self.notices += self.assumed
        if self.is_model and not of_towers(self.keys):
            self.notices += self.model.tower_notices(self.config_fields, self.towers)
        self._take_beside(self.config_fields)

    def _planned(self, placed: KeyPlacement) -> Plan:
        """Plan where each canonical tensor is read from. Raises ReshardError where the keys lack an element."""
        canonical = {n: shape for n, shape in self.mapping.shapes.items() if n not in self.mapping.copies}
        try:
            return make_plan(placed.placement, Placement.canonical(canonical | self.state_shapes))
        except PlanError as error:
            raise ReshardError(
                f"{self.checkpoint.directory} does not hold every element of the model's tensors: {error}"
            ) from error

    def _copies(self, manifest: dict[str, Any] | None) -> dict[str, str]:
        """Return the names that repeat another tensor: as in the files that this was converted from, or else as in
        published ones."""
        recorded, mapping = set((manifest or {}).get("tensors", {})), self.mapping
        return {
            n: p
            for n, p in mapping.copies.items()
            if (n in recorded if recorded else n not in mapping.optional)
        }

    def _tensors(self) -> dict[str, TensorInfo]:
        """Return shapes and dtypes: of the model's tensors in the order of its table, of states, and of towers."""
        placed = {name: self._info(name) for name in self.transfers}
        placed |= {name: placed[primary] for name, primary in self.copies.items()}
        names = (*self.mapping.shapes, *self.state_shapes)
        towers = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in self.towers.items()}
        return {name: placed[name] for name in names if name in placed} | towers

    @cached_property
    def text_keys(self) -> dict[str, torch_dist.Key]:
        """The checkpoint's keys, those of a language model in a larger one as they are where it is by itself. Raises
        ReshardError for one that is there twice then."""
        keys = {text_key(key): entry for key, entry in self.checkpoint.keys.items()}
        if len(keys) != len(self.checkpoint.keys):
            raise ReshardError(
                f"{self.checkpoint.directory} has tensors of a language model both by itself and in a larger model"
            )
        return keys

    def _chosen_keys(self, without_adapters: bool) -> dict[str, torch_dist.Key]:
        """Return the keys of the checkpoint that are read. Raises ReshardError if they are not
        those of a language model."""
        keys = base_keys(self.text_keys, self.checkpoint.directory, without_adapters)
        check_language_model(keys, self.checkpoint.directory)
        return keys

    def _gtp(self) -> Gtp:
        """Return the sizes of GTP that the checkpoint was saved at; Megatron-FSDP has none."""
        if isinstance(self.checkpoint, FsdpDtensor):
            return WITHOUT_GTP
        return gtp_of(self.keys, self._said_of_gtp(), self.checkpoint.directory)

    def _said_of_gtp(self) -> dict[str, Any] | None:
        """Return what the checkpoint's args, or Megatron-Bridge's config beside it, say of GTP; None where neither
        does."""
        args: dict[str, Any] = self.checkpoint.common().get("args") or {}
        if says_gtp(args):
            return args
        for path in run_configs(self.located):
            settings = {
                name: int(text) if text.isdigit() else None for name, text in section(path, "model").items()
            }
            if names_gtp(settings):
                return settings
        return None

    def _states_to_read(self, wanted: States) -> OptimizerStates | None:
        """Return the optimizer states that are read. Raises ReshardError if they are wanted, and
        cannot be moved."""
        is_recorded = any(name.startswith(STATE) for name in self._recorded())
        if wanted == "none" or (wanted == "recorded" and not is_recorded):
            return None
        states = states_of(self.checkpoint)
        if wanted == "movable" and (states is None or not states.can_move):
            return None
        if states is not None:
            check_movable(states, self.checkpoint.directory)
        return states

    def _state_notices(self) -> list[str]:
        """Return notices of the optimizer states that are read, and of what a training has besides."""
        if self.states is None:
            return []
        along = f"optimizer states go along: {', '.join(sorted(self.states.keys))}"
        rng = "states of RNGs, which are those of ranks, stay behind: a run with dropout draws other numbers"
        has_rng = any(key.startswith(NOT_WEIGHTS["RNG state"]) for key in self.checkpoint.objects)
        return [along] + [rng] * has_rng

    def _recorded(self) -> dict[str, Any]:
        """Return the tensors that the manifest of this iteration lists."""
        manifest = self.manifest()
        return {} if manifest is None or not self.is_of(manifest) else manifest["tensors"]

    def is_of(self, manifest: dict[str, Any]) -> bool:
        """Return True if a manifest is of this iteration, and not of another in the same directory,
        which training has left behind."""
        return self.alone or manifest.get("iteration") in (None, self.checkpoint.iteration)

    def _expanded(self) -> ModelParameters:
        """Return the parameters that the keys have to be. Beside optimizer states, the rows of padding
        are kept as far as a vocabulary of `vocab_multiple` has them."""
        args = (self.checkpoint.common().get("args") or {}) if self.gtp.others > 1 else {}
        vocab = vocab_rows(
            self.keys,
            self.checkpoint.directory,
            self.model,
            self.gtp.others,
            args.get("padded_vocab_size"),
        )
        published, kept, self.cuts_padding = self.model.symbols["V"], 0, False
        if self.states is not None:
            listed_rows = [
                e["shape"][0] for n, e in self._recorded().items() if n.startswith(PADDING) and e["shape"]
            ]
            rows = vocab - published
            own = min([rows, *listed_rows]) if listed_rows or not self._recorded() else 0
            limit = (
                padded_vocab_size(published, self.vocab_multiple, 1) - published
                if self.vocab_multiple
                else own
            )
            kept, self.cuts_padding = min(own, limit), limit < own
        text = expand(self.model, padded_vocab=vocab, model_class=self.model_class, kept_padding=kept)
        return with_tower(text, self._larger(), self.keys, self.checkpoint.directory)

    def _larger(self) -> Model:
        return takes_tower(self.model, self.config_fields)

    def _placed_with(self, states: States) -> KeyPlacement:
        """Place the weights, and the optimizer states that are read: without states that have no place, where those
        that can be moved were asked for. Raises ReshardError for such states where all were."""
        try:
            return self._placed()
        except UnplacedStatesError as error:
            if states != "movable":
                raise ReshardError(f"{error}; --without-optimizer takes the weights alone") from error
            self.states, self.unplaced_states = None, str(error)
            self.mapping = self._expanded()
            return self._placed()

    def _placed(self) -> KeyPlacement:
        """Place the weights, and with them the optimizer states that are read."""
        own = set() if self.states is None else self.states.names()
        keys = {key: entry for key, entry in self.keys.items() if key not in own}
        directory, objects = self.checkpoint.directory, self.checkpoint.objects
        placed = placement_of_keys(keys, objects, directory, self.model, self.mapping, gtp=self.gtp)
        self.state_shapes: dict[str, tuple[int, ...]] = {}
        if self.states is None:
            return placed
        try:
            of_states = placement_of_states(self.states, self.checkpoint, self.model, self.mapping, self.gtp)
        except ReshardError as error:
            raise UnplacedStatesError(str(error)) from error
        self.state_shapes = dict(of_states.shapes)
        tensors = dict(placed.placement.tensors) | dict(of_states.tensors)
        return KeyPlacement(Placement(self.mapping.shapes | self.state_shapes, tensors), placed.notices)

    def leaves_out(self, name: str) -> bool:
        """Return True for a tensor of the manifest that is not read: a state of the optimizer that was not
        asked for, or padding that is cut off."""
        if self.states is None:
            return name.startswith((STATE, PADDING))
        return self.cuts_padding and (name.startswith(PADDING) or f".{PADDING}" in name)

    def spans(self, file: str) -> list[tuple[int, int]]:
        if file == f"{HF_FILES}/{TOWERS}":
            return safetensors.spans(self.towers.values())
        chunks = [stored for key in self.checkpoint.keys.values() for stored in key.chunks.values()]
        tensors = [self.containers.tensor_at(stored) for stored in chunks if stored.file == Path(file).name]
        return sorted((t.offset, t.offset + prod(t.shape) * t.dtype.size) for t in tensors)

    def training_state(self) -> TrainingState | None:
        """Return what a training run resumes from besides the tensors; None if no optimizer states are
        read."""
        return None if self.states is None else TrainingState.of(self.checkpoint)

    def _model(self, family: str | None, taken: list[str]) -> tuple[Model, str]:
        """Return the model, and where its config stands. Notices of where that was found are added
        to `taken`."""
        if self.hf_config is not None:
            config = self.hf_config / "config.json" if self.hf_config.is_dir() else self.hf_config
            fields, where = read_config(config), str(config)
        else:
            beside = config_beside(self.located)
            args = dict(self.checkpoint.common().get("args") or {}) if beside is None else {}
            if beside is None:
                beside = config_of_args(args)
            if beside is None:
                return self._model_of_args(args, family)
            fields, where, self.config_directory = beside.fields, beside.where, beside.directory
            if beside.directory is not None:
                self.versions.record(beside.directory)
            taken += [beside.notice] if beside.notice else []
        self.config_fields, model = fields, Model.from_hf(fields, where)
        if family is not None:
            check_family(family)
        if family not in (None, model.family.name):
            raise ReshardError(
                f"--family {family} contradicts {where}, which is of a {model.family.name}: leave it out"
            )
        args = as_text_args(self.checkpoint.common().get("args") or {}, model, "the checkpoint's args")
        check_args(
            model,
            args,
            f"{self.checkpoint.directory} (args)",
            "pass --hf-config with the config.json that it was trained with",
        )
        if model.mtp_layers and not any(key.startswith("mtp.") for key in self.keys):
            taken.append(
                f"{where} announces {model.mtp_layers} MTP layers, but the checkpoint has none; converted without"
            )
            model = replace(model, mtp_layers=0)
        return model, where

    def _model_of_args(self, args: dict[str, Any], family: str | None) -> tuple[Model, str]:
        where, named = f"{self.checkpoint.directory} (args)", model_named(self.located)
        hint = f", such as {named}, with which its training began" if named else ""
        if not args:
            raise ReshardError(
                f"{self.checkpoint.directory} has no args and no {HF_FILES}/config.json: pass "
                f"--hf-config with the model's config.json{hint}"
            )
        if args.get("vocab_size") is None:
            raise ReshardError(
                f"{where} do not say the vocabulary size without padding: pass "
                f"--hf-config with the model's config.json{hint}"
            )
        return model_of_args(args, where, family), "args"

    def _info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor. Raises ReshardError if its chunks have different dtypes."""
        dtypes = {self.keys[transfer.src[0]].dtype.name for transfer in self.transfers[name]}
        if len(dtypes) > 1:
            raise ReshardError(
                f"{self.checkpoint.directory}: {name} lies in chunks of different dtypes: {listed(sorted(dtypes))}"
            )
        return TensorInfo(self.plan.dst.shapes[name], DTYPES[dtypes.pop()])

    def _towers(self) -> tuple[Path, dict[str, safetensors.Tensor]]:
        """Return the tensors around the language model, and the directory of their files: the
        checkpoint's ``hf/``, or the directory of the config that was given. None of a model that is
        only a language model."""
        directory = self.config_directory or self.root / HF_FILES
        if not self.model.towers or of_towers(self.keys):  # it is in the checkpoint
            return directory, {}
        if (directory / TOWERS).is_file():
            return directory, safetensors.read_header(directory / TOWERS)
        if self.hf_config is None or not self.hf_config.is_dir():
            return directory, {}
        if not self.model.wrapped and not any(self.hf_config.glob("*.safetensors")):
            return directory, {}  # of a model that is whole without them
        stored = safetensors.read_directory(self.hf_config)
        return self.hf_config, {n: tensor for n, tensor in stored.items() if self.model.is_of_tower(n)}

    @cached_property
    def held(self) -> dict[str, TensorInfo]:  # type: ignore[override]
        held = dict(self.tensors)
        for name in self.mapping.less_1 & held.keys():
            held[name] = replace(held[name], dtype=held[name].dtype.held(less_1=True))
        return held

    def strips(self, name: str) -> list[Strip]:
        tower = self.towers.get(name)
        if tower is not None:
            path = self.tower_directory / tower.file
            return strips_of_view(name, tower.shape, path, tower.offset, tower.dtype.size)
        return [self._strip(transfer) for transfer in self.transfers[self.copies.get(name, name)]]

    def _strip(self, transfer: Transfer) -> Strip:
        key, offsets, sizes, before = transfer.src
        stored, dtype = self.keys[key].chunks[offsets, sizes], self.keys[key].dtype
        tensor, path = self.containers.chunk_at(stored, key, dtype, sizes), self.containers.path(stored)
        local = self.plan.src.tensors[transfer.src].shape
        return strip_of(transfer.box.offsets, transfer.box.lengths, transfer.src_at, local, path,
                        tensor.offset + before * dtype.size, dtype.size)  # fmt: skip

    def hf_directory(self) -> Path | None:
        if self.hf_config is not None and self.hf_config.is_dir():
            return self.hf_config
        beside = self.config_directory or self.root / HF_FILES
        return beside if beside.is_dir() else None

    def read_files(self) -> list[Path]:
        checkpoint, config = self.checkpoint, [] if self.hf_config is None else [self.hf_config]
        chunks = (stored for key in checkpoint.keys.values() for stored in key.chunks.values())
        names = {
            ".metadata",
            "metadata.json",
            "common.pt",
            *(stored.file for stored in (*chunks, *checkpoint.objects.values())),
        }
        small = [
            self.root / torch_dist.TRACKER,
            self.root / MANIFEST,
            (self.config_directory or self.root / HF_FILES) / "config.json",
            *config,
            *(run_configs(self.located) if of_towers(self.keys) else ()),
            *{self.tower_directory / tensor.file for tensor in self.towers.values()},
        ]
        return [*small, *(checkpoint.directory / name for name in sorted(names)), *self._beside().values()]

    def left_beside(self) -> list[str]:
        read = self.read_files()
        names = unread_beside(self.checkpoint.directory, read)
        if self.root not in (self.checkpoint.directory, self.hf_directory()):
            names += unread_beside(self.root, [*read, self.checkpoint.directory])
        return names

    def hf_files(self) -> dict[str, Path]:
        files = super().hf_files()
        if self.hf_config is not None and self.hf_config.is_file():
            files["config.json"] = self.hf_config
        return files

    def manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.root)

    def describe(self) -> dict[str, Any]:
        files = {stored.file for key in self.checkpoint.keys.values() for stored in key.chunks.values()}
        states = states_of(self.checkpoint)
        saved_by = {"saved_by": f"Megatron-FSDP ({FORMAT})"}
        return (
            {
                "iteration": self.checkpoint.iteration,
                "files": len(files),
                "keys": len(self.checkpoint.keys),
                "model_class": self.model_class,
                "config": self.config_from,
            }
            | (saved_by if isinstance(self.checkpoint, FsdpDtensor) else {})
            | ({} if states is None else {"optimizer": states.describe()})
        )

    def close(self) -> None:
        self.files.close()
