"""Which model a live Megatron is, by a Hugging Face config: the names and shapes that its weights are published
under, its layout, and the files that go beside them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.formats import safetensors
from reshard.formats.small_files import MAX_COPIED_BYTES, MAX_INDEX_BYTES, read_json
from reshard.megatron.layout import MegatronLayout
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.base import files_beside, ignored_as_recorded, read_config
from reshard.storage.sources.hf_hub import BESIDE_WEIGHTS, local_directory
from reshard.storage.sources.paths import HF_FILES, locate


@dataclass(frozen=True)
class Published:
    """`model` is what the config says, `beside` are the files next to it by name, `stored` the tensors that its
    directory has or had, empty where it does not say; `path` is the directory or the file, None where there is
    neither."""

    path: Path | None
    model: Model
    beside: dict[str, Path]
    stored: frozenset[str]

    @property
    def digest(self) -> str:
        """Of what the config says, wherever a rank has it."""
        return digest_of(self.model)

    @staticmethod
    def of(config: Any) -> "Published":
        """Of a transformers config: nothing is beside it."""
        if not hasattr(config, "to_dict"):
            raise ReshardError(
                f"hf_config is a {type(config).__name__}, which is neither a path, a hub id nor a transformers config"
            )
        name = f"the {type(config).__name__}"
        return Published(None, Model.from_hf(config.to_dict(), name), {}, frozenset())

    @staticmethod
    def read(config: "str | Path | Published | Any") -> "Published":
        """Of a ``config.json``, a directory with one, a Megatron checkpoint with ``hf/``, a hub id, of which
        all but the weights is fetched, or a transformers config. Raises ReshardError where there is none."""
        if isinstance(config, Published):
            return config
        if not isinstance(config, str | Path):
            return Published.of(config)
        root = config_path(config)
        if root.is_file():
            model = Model.from_hf(read_config(root), str(root))
            check_ignored(model)
            return Published(root, model, {"config.json": root}, frozenset())
        found = locate(root)
        if found is not None and (found.root / HF_FILES / "config.json").is_file():
            root = found.root  # of the iteration that is the checkpoint's last
        path = root / HF_FILES if (root / HF_FILES / "config.json").is_file() else root
        with ignored_as_recorded(root):
            model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        check_ignored(model)
        beside = {p.name: p for p in files_beside(path) if p.stat().st_size <= MAX_COPIED_BYTES}
        stored = (read_manifest(root) or {}).get("tensors") or _stored(path)
        return Published(path, model, beside, frozenset(stored))


def digest_of(model: Model) -> str:
    """A digest of what a model's config says, but for where it lay and what wrote it."""
    said = {
        key: value for key, value in model.config.items() if key[0] != "_" and key != "transformers_version"
    }
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stored(path: Path) -> Iterable[str]:
    """The names of the tensors of a Hugging Face directory, also of one that was fetched without them."""
    if (path / safetensors.INDEX).is_file():
        names = read_json(path / safetensors.INDEX, "a readable index", MAX_INDEX_BYTES).get("weight_map")
        return names if isinstance(names, dict) else ()
    single = path / safetensors.SINGLE
    return safetensors.read_header(single) if single.is_file() else ()


def config_path(config: str | Path) -> Path:
    """A ``config.json``, or a directory with one: as it is, or of a hub id, of which all but the weights is
    fetched."""
    return Path(config) if Path(config).is_file() else local_directory(str(config), BESIDE_WEIGHTS)


def layout_of(config: Any) -> MegatronLayout:
    """The layout of a live model, by its ``TransformerConfig``. Raises ReshardError where its stages were not
    given as a string."""
    pipeline = getattr(config, "pipeline_model_parallel_layout", None)
    text = None if pipeline is None else getattr(pipeline, "input_data", pipeline)
    if not isinstance(text, (str, type(None))):
        raise ReshardError(
            "the trainer's pipeline_model_parallel_layout was given as a list: pass layout=, with the string"
        )
    return MegatronLayout(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=1 if text is not None else config.virtual_pipeline_model_parallel_size or 1,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size if config.num_moe_experts else None,
        first_stage_layers=config.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.num_layers_in_last_pipeline_stage,
        embedding_in_split=bool(getattr(config, "account_for_embedding_in_pipeline_split", False)),
        loss_in_split=bool(getattr(config, "account_for_loss_in_pipeline_split", False)),
        pipeline=text,
    )


def implementation_of(models: list[torch.nn.Module]) -> str:
    """Which layers a live model is made of: ``transformer_engine`` or ``local``."""
    modules = (type(module).__module__ for model in models for module in model.modules())
    engine = any(name.startswith(("transformer_engine", "megatron.core.extensions.transformer_engine"))
                 for name in modules)  # fmt: skip
    return "transformer_engine" if engine else "local"
