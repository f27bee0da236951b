"""The calls of mbridge's ``AutoBridge``, for trainers that have those: a model from a Hugging Face config, its
weights loaded, exported and saved."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.megatron.build import build_megatron, parallel_layout
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.live.config import Published
from reshard.megatron.live.export import export
from reshard.megatron.live.load import LoadReport, load
from reshard.megatron.live.save import SaveReport, save

Models = Sequence[torch.nn.Module]


class AutoBridge:
    """A Hugging Face model as a live Megatron: made by `from_pretrained` or `from_config`.

    `dtype` is that of the parameters; `transformer_impl`, `make_vocab_size_divisible_by` and `overrides` (fields
    of Megatron's ``TransformerConfig``) are those of `build_megatron`.
    """

    def __init__(
        self,
        hf_config: str | Path | Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        transformer_impl: str = "transformer_engine",
        make_vocab_size_divisible_by: int = 128,
        **overrides: Any,
    ) -> None:
        self.hf_config = hf_config
        self.model = Published.read(hf_config).model
        self.path = hf_config if isinstance(hf_config, (str, Path)) else None
        self.dtype, self.impl, self.overrides = dtype, transformer_impl, overrides
        self.padding = {"make_vocab_size_divisible_by": make_vocab_size_divisible_by}

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "AutoBridge":
        """Of a Hugging Face directory or hub id; weights are fetched when they are loaded."""
        return cls(path, **options)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> "AutoBridge":
        """Of a transformers config, which has no tokenizer beside it, or of a ``config.json``."""
        return cls(config, **options)

    def get_model(
        self,
        weight_path: str | Path | None = None,
        *,
        layout: MegatronLayout | None = None,
        wrap_with_ddp: bool = True,
        ddp_config: Any = None,
    ) -> list[torch.nn.Module]:
        """This rank's chunks, on its GPU where there is one, in Float16Module (bf16 and fp16) and DDP, with the
        weights at `weight_path` if that is given.

        Megatron's parallel state must be initialized; `layout` says more than its sizes where stages are
        uneven.
        """
        layout = layout or parallel_layout()
        found = build_megatron(
            self.model, layout, transformer_impl=self.impl, dtype=self.dtype,
            vocab_divisible_by=self.padding["make_vocab_size_divisible_by"], **self.overrides,
        )  # fmt: skip
        models = [_wrapped(chunk, self.dtype, wrap_with_ddp, ddp_config) for chunk in found]
        if weight_path is not None:
            self.load_weights(models, weight_path)
        return models

    def load_weights(self, models: Models, path: str | Path | None = None, **options: Any) -> LoadReport:
        """See `load`; by default from where this bridge came from, cast to the parameters' dtype."""
        source = self.path if path is None else path
        if source is None:
            raise ReshardError("this bridge was made of a config, which has no weights: give a path")
        name = str(self.dtype).removeprefix("torch.")
        return load(models, source, **{"dtype": name, **self.padding, **options})

    def export_weights(self, models: Models, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """See `export`."""
        return export(models, self.hf_config, **{**self.padding, **options})

    def save_weights(self, models: Models, path: str | Path, **options: Any) -> SaveReport:
        """Write a Hugging Face directory; see `save`."""
        report = save(models, path, self.hf_config, **{"format": "hf", **self.padding, **options})
        return report if isinstance(report, SaveReport) else report.result()


def _wrapped(chunk: torch.nn.Module, dtype: torch.dtype, ddp: bool, ddp_config: Any) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    config: Any = chunk.config
    if torch.cuda.is_available():
        chunk = chunk.cuda(torch.cuda.current_device())
    if dtype != torch.float32:
        chunk = Float16Module(config, chunk)
    if not ddp:
        return chunk
    options = ddp_config or DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, options, chunk)
