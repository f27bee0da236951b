"""transformers as a system: a Hugging Face directory, run by the published modeling code."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.extras import importing
from reshard.models.model import Model
from reshard.parity.systems.base import DTYPES, ForwardSystem
from reshard.parity.systems.processes import device, release_memory
from reshard.parity.systems.watching import watched
from reshard.quantization import modelopt
from reshard.quantization.compressed_tensors import METHOD, NVFP4_FORMAT
from reshard.storage.sources.base import read_config

ROUTER = "mlp.router.weight"


class HuggingFace(ForwardSystem):
    """A Hugging Face directory in transformers."""

    spread = False

    def __init__(self, path: Path, dtype: str) -> None:
        self.name = f"transformers, {path}, {dtype}"
        self.model = Model.from_hf(read_config(path / "config.json"), str(path / "config.json"))
        self.path, self.dtype = path, dtype
        _refuse_unreadable(path, self.model)

    @cached_property
    def module(self) -> torch.nn.Module:
        """The model, loaded when it is first used: of several processes one is enough."""
        model_class = self._class()  # what it returns depends on the options
        # fp32 not before weights are dequantized: else transformers rounds the products of experts
        # to that dtype, all others to the scales'.
        wide = self._compressed() and self.dtype == "fp32"
        options: dict[str, Any] = {
            "dtype": "auto" if wide else DTYPES[self.dtype],
            "trust_remote_code": False,  # without it transformers asks at a terminal
        }
        try:
            if self._compressed():
                options["quantization_config"] = _dequantizing_config()
            module, loading_info = model_class.from_pretrained(
                self.path, attn_implementation="eager", output_loading_info=True, **options
            )
        except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ReshardError(f"transformers cannot load {self.path}: {first_line(error)}") from error
        if loading_info["missing_keys"]:  # transformers would draw them at random
            missing = listed(sorted(loading_info["missing_keys"]), 3)
            problem = f"cannot dequantize {missing} of" if self._compressed() else f"finds no {missing} in"
            raise ReshardError(f"transformers {problem} {self.path}")
        return (module.float() if wide else module).eval().to(device())

    @cached_property
    def unused(self) -> set[str]:
        """The names of the parameters that no prompt has used so far."""
        return {name for name, _ in self.module.named_parameters()}

    def _class(self) -> Any:
        """Return the class of transformers that loads the model, a language model of its own if there is
        one."""
        with importing("parity"):
            from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        kind = read_config(self.path / "config.json").get("model_type")
        whole = self.model.wrapped and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        return AutoModelForImageTextToText if whole else AutoModelForCausalLM

    def submodule(self, name: str) -> torch.nn.Module:
        """Return a module of the language model, by its name in a model that is nothing else."""
        try:
            return self.module.get_submodule(name)
        except AttributeError:
            return self.module.get_submodule(self.model.published_name(name))

    def _compressed(self) -> bool:
        """Return True if compressed-tensors quantized the weights; its config has transformers
        quantize activations too."""
        return _quantization(self.model).get("quant_method") == METHOD  # type: ignore[no-any-return]

    def logits(
        self,
        tokens: torch.Tensor,
        lengths: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        # Right padding: no token before it sees it, so that no mask is needed. Packed prompts are
        # told apart by their positions, unless there is a mask.
        options: dict[str, torch.Tensor] = {}
        if lengths is not None:
            options["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None].to(tokens.device)
        if positions is not None:
            options["position_ids"] = torch.tensor(positions, device=tokens.device)[None]
            options["attention_mask"] = torch.ones_like(tokens)
        if not self.unused:
            return self.module(tokens, use_cache=False, **options).logits
        with watched(self.module) as unused:
            logits = self.module(tokens, use_cache=False, **options).logits
        self.unused &= unused
        return logits

    def roots(self) -> Sequence[torch.nn.Module]:
        return [self.module]

    def routers(self) -> dict[int, torch.nn.Module]:
        family = self.model.family
        if not self.model.moe_layers:
            return {}
        [published] = {row.hf for row in family.rows["layer"] if row.megatron == ROUTER}
        module = dict(family.in_memory).get(published, published).removesuffix(".weight")
        return {
            layer: self.submodule(family.name_in_memory(f"{family.layers}{layer}.{module}"))
            for layer in self.model.moe_layers
        }

    def indexers(self) -> dict[int, torch.nn.Module]:
        modules: Iterable[Any] = self.module.modules()
        return {m.layer_idx: m for m in modules if getattr(m, "indexer", None) is not None}

    def choices(self, router: Any, inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _, experts = output
        # A router that has no bias of its own may be given one.
        bias = getattr(router, "e_score_correction_bias", inputs[1] if len(inputs) > 1 else None)
        return experts, logits.float() if bias is None else logits.float().sigmoid() + bias.float()

    def close(self) -> None:
        for name in ("module", "unused"):
            vars(self).pop(name, None)
        release_memory()


def _quantization(model: Model) -> Mapping[str, Any]:
    config = model.config.get("quantization_config")
    return config if isinstance(config, dict) else {}


def _refuse_unreadable(path: Path, model: Model) -> None:
    """Raise ReshardError for quantized weights that transformers misreads or cannot read."""
    config = _quantization(model)
    groups = config.get("config_groups")
    forms = [config, *(groups.values() if isinstance(groups, dict) else ())]
    problem = None
    if config.get("quant_method") == modelopt.METHOD or (path / modelopt.CONFIG).is_file():
        problem = "does not read weights that ModelOpt has quantized"
    elif model.num_experts and any(
        isinstance(form, dict) and form.get("format") == NVFP4_FORMAT for form in forms
    ):
        problem = "dequantizes experts in nvfp4 without their global scale"
    if problem is not None:
        raise ReshardError(
            f"transformers {problem}, as those of {path}: compare the Megatron checkpoint that hf-to-mcore "
            "makes of it, or what it was made of"
        )


def _dequantizing_config() -> Any:
    """Return the config with which transformers dequantizes compressed-tensors weights while it
    loads them. Raises ImportError if that package, or a transformers that does it, is not
    installed."""
    from transformers import CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    if not getattr(config, "dequantize", False):
        raise ImportError("weights by compressed-tensors are dequantized by newer versions of transformers")
    return config
