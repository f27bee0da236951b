"""The published model that a live Megatron is: its Hugging Face config, and the files that lie beside it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.formats import safetensors
from reshard.formats.small_files import MAX_INDEX_BYTES, read_json
from reshard.megatron.gtp import Gtp
from reshard.megatron.hybrid import stages_of_pattern
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.towers import takes_tower
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model
from reshard.models.published import own_fields
from reshard.models.without_table import any_model
from reshard.storage.manifest import read_manifest
from reshard.storage.sources.base import ignored_as_recorded, read_config
from reshard.storage.sources.beside import beside
from reshard.storage.sources.hf_hub import config_path
from reshard.storage.sources.paths import HF_FILES, locate


@dataclass(frozen=True)
class PublishedModel:
    """A Hugging Face config with its surroundings.

    `path` is the directory or file that `config` was read from, None for one in memory. `beside` are the files
    next to it by name, `stored` the names of the tensors in its directory, empty if they are not known.
    """

    path: Path | None
    config: Mapping[str, Any]
    model: Model
    beside: dict[str, Path]
    stored: frozenset[str]

    @property
    def digest(self) -> str:
        """A digest of the config, the same wherever it lies."""
        return digest_of(self.model)

    @staticmethod
    def from_transformers(config: Any) -> "PublishedModel":
        """Make one of a transformers config, which has no files beside it."""
        if not hasattr(config, "to_dict"):
            raise ReshardError(
                f"hf_config is a {type(config).__name__}, which is neither a path, a hub id nor a transformers config"
            )
        fields = config.to_dict()
        return PublishedModel(None, fields, _whole(fields, f"the {type(config).__name__}"), {}, frozenset())

    @staticmethod
    def read(config: "str | Path | PublishedModel | Any") -> "PublishedModel":
        """Read a ``config.json``, a directory with one, a Megatron checkpoint with ``hf/``, a hub
        id (all but the weights is fetched), or a transformers config. Raises ReshardError if
        there is none."""
        if isinstance(config, PublishedModel):
            return config
        if not isinstance(config, str | Path):
            return PublishedModel.from_transformers(config)
        root = config_path(config)
        if root.is_file():
            fields = read_config(root)
            model = _whole(fields, str(root))
            check_ignored(model)
            return PublishedModel(root, fields, model, {"config.json": root}, frozenset())
        checkpoint = locate(root)
        if checkpoint is not None and (checkpoint.root / HF_FILES / "config.json").is_file():
            root = checkpoint.root  # of the last iteration
        path = root / HF_FILES if (root / HF_FILES / "config.json").is_file() else root
        with ignored_as_recorded(root):
            fields = read_config(path / "config.json")
            model = _whole(fields, str(path / "config.json"))
        check_ignored(model)
        files = beside(path).files
        stored = (read_manifest(root) or {}).get("tensors") or _stored(path)
        return PublishedModel(path, fields, model, files, frozenset(stored))


def _whole(config: dict[str, Any], where: str) -> Model:
    """Return the model of a config, with the tower around it."""
    return takes_tower(any_model(config, where), config)


def digest_of(model: Model) -> str:
    """Return a digest of a model's config, without where it lay and what wrote it."""
    text = json.dumps(own_fields(model.config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stored(path: Path) -> Iterable[str]:
    """Return the names of the tensors of a Hugging Face directory, also of one that was fetched without
    them."""
    if (path / safetensors.INDEX).is_file():
        names = read_json(path / safetensors.INDEX, "a readable index", MAX_INDEX_BYTES).get("weight_map")
        return names if isinstance(names, dict) else ()
    single = path / safetensors.SINGLE
    return safetensors.read_header(single) if single.is_file() else ()


def layout_of(config: Any, pattern: str | None = None) -> MegatronLayout:
    """Return the layout of a live model with this ``TransformerConfig`` and, of a HybridModel, this
    pattern. Raises ReshardError if its stages were not given as a string."""
    gtp = _gtp_of(config)
    if pattern is not None:
        if config.num_layers_in_first_pipeline_stage or config.num_layers_in_last_pipeline_stage:
            raise ReshardError("the trainer's stages are not in its hybrid_layer_pattern: pass layout=")
        return MegatronLayout(
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size if config.num_moe_experts else None,
            gtp=gtp.others,
            egtp=gtp.experts,
            **stages_of_pattern(pattern, config.pipeline_model_parallel_size),
        )
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
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=bool(
            getattr(config, "account_for_embedding_in_pipeline_split", False)
        ),
        account_for_loss_in_pipeline_split=bool(getattr(config, "account_for_loss_in_pipeline_split", False)),
        pipeline_model_parallel_layout=text,
        gtp=gtp.others,
        egtp=gtp.experts,
    )


def _gtp_of(config: Any) -> Gtp:
    """Return the sizes of GTP, which Megatron-Core before 0.19 has not."""
    experts = getattr(config, "expert_gtp_weight_remat_size", 1) if config.num_moe_experts else 1
    return Gtp(getattr(config, "gtp_weight_remat_size", 1), experts)


def implementation_of(models: list[torch.nn.Module]) -> str:
    """Return which layers a live model is made of: ``transformer_engine`` or ``local``."""
    modules = (type(module).__module__ for model in models for module in model.modules())
    engine = any(name.startswith(("transformer_engine", "megatron.core.extensions.transformer_engine"))
                 for name in modules)  # fmt: skip
    return "transformer_engine" if engine else "local"
