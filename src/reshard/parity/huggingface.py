"""transformers as a system: a Hugging Face directory, run by the published modelling code."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import importing
from reshard.disk.sources import read_config
from reshard.models.model import Model
from reshard.parity.systems import DTYPES, ForwardSystem, device, release_memory


class HuggingFace(ForwardSystem):
    """A Hugging Face directory in transformers."""

    spread = False

    def __init__(self, path: Path, dtype: str) -> None:
        self.name = f"transformers, {path}, {dtype}"
        self.model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        self.path, self.dtype = path, dtype

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model, loaded where it is first asked for: of several processes one is enough."""
        with importing("parity"):
            from transformers import AutoModelForCausalLM

        try:
            module = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=DTYPES[self.dtype], attn_implementation="eager"
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ReshardError(f"transformers cannot load {self.path}: {first_line(error)}") from error
        return module.eval().to(device())

    def logits(self, tokens: torch.Tensor, lengths: Sequence[int] | None = None) -> torch.Tensor:
        # Right padding: no token before it sees it, so that no mask is needed. Packed prompts are told apart
        # by their positions.
        restarting = (
            {}
            if lengths is None
            else {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(tokens.device)}
        )
        return self.module(tokens, use_cache=False, **restarting).logits

    def routers(self) -> dict[int, torch.nn.Module]:
        return {
            layer: self.module.get_submodule(f"model.layers.{layer}.mlp.gate")
            for layer in self.model.moe_layers
        }

    def choices(self, router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _, experts = output
        bias = getattr(router, "e_score_correction_bias", None)
        return experts, logits.float() if bias is None else logits.float().sigmoid() + bias.float()

    def close(self) -> None:
        vars(self).pop("module", None)
        release_memory()
