"""The LoRA adapter in a Megatron ``torch_dist`` checkpoint of Megatron-Bridge or mcore-bridge, alone or beside its
base model, read as PEFT's tensors."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.formats import safetensors, torch_dist
from reshard.formats.small_files import read_json
from reshard.lora.checkpoint import WRAPPED, adapter_keys, find_adapters
from reshard.lora.names import A, peft_name
from reshard.lora.parameters import Adapter, AdapterForm, adapter_parameters
from reshard.lora.peft_config import CONFIG, check_plain
from reshard.lora.scale import Scale, as_number
from reshard.megatron.gtp import WITHOUT_GTP, Gtp, gtp_of, named_gtp
from reshard.megatron.hybrid import class_of_keys
from reshard.megatron.parameters import ModelParameters, expand
from reshard.megatron.towers import of_towers
from reshard.models.model import Model
from reshard.storage.lora.source import AdapterSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.paths import RUN_CONFIG, model_named
from reshard.storage.sources.run_config import section


class MegatronAdapterSource(AdapterSource, MegatronSource):
    """The adapter of a Megatron checkpoint, of `model` where that is given.

    The rank is that of A. `alpha`, if given, is the adapter's; else it is taken from the config that
    the trainer has left. `swiglu_ranks` is the tensor-parallel size with which it was saved, by
    default what the checkpoint says. Raises ReshardError if one is needed and not there.
    """

    kind = "megatron adapter"

    def __init__(
        self,
        path: Path,
        hf_config: Path | None = None,
        *,
        alpha: float | None = None,
        swiglu_ranks: int | None = None,
        model: Model | None = None,
    ) -> None:
        self.given_alpha, self.given_ranks, self.given_model = alpha, swiglu_ranks, model
        super().__init__(path, hf_config)
        self.base_name = model_named(self.located) or (self.manifest() or {}).get("base_model")

    def _chosen_keys(self, without_adapters: bool) -> dict[str, torch_dist.Key]:
        """Return the keys of the adapter. Raises ReshardError if one of them is of a tower."""
        keys = adapter_keys(self.text_keys)
        if (
            named_gtp(self._said_of_gtp() or {}, self.checkpoint.directory) != WITHOUT_GTP
            or self._gtp() != WITHOUT_GTP
        ):
            raise ReshardError(
                f"{self.checkpoint.directory} holds an adapter that was trained under GTP, which is not converted: "
                f"merge it with its trainer"
            )
        tower = of_towers(keys)
        if tower:
            raise ReshardError(
                f"{self.checkpoint.directory} holds an adapter of the tower around its language model ({len(tower)} "
                f"tensors: {listed(sorted(tower), 2)}), which is not converted: merge it with its trainer, or train "
                f"one of the language model alone"
            )
        return {key: self.text_keys[key] for key in keys}

    def _gtp(self) -> Gtp:
        """Return the sizes of GTP of the adapter's base, where that is there."""
        of_base = {WRAPPED.sub(".", key): entry for key, entry in self.text_keys.items()}
        return gtp_of(of_base, self._said_of_gtp(), self.checkpoint.directory)

    def _model(self, family: str | None, taken: list[str]) -> tuple[Model, str]:
        if self.given_model is not None:
            return self.given_model, self.given_model.where
        return super()._model(family, taken)

    def _expanded(self) -> ModelParameters:
        self.model_class = class_of_keys(self.text_keys)  # of its base, where that is there
        self.base = expand(self.model, model_class=self.model_class)
        where = self.checkpoint.directory
        saved = self._saved_tp()
        ranks = self.given_ranks or saved
        self.adapters: list[Adapter]
        self.form: AdapterForm
        layers, self.form = find_adapters(self.keys, where, self.model, self.base, ranks or 1)
        layers = self._as_recorded(layers)
        self._check_expert_tensor_parallel(layers)
        self.adapters = [adapter for adapter in layers if adapter.ranks]
        gated = any(a.layer.first.halves == 2 and not a.layer.of_experts for a in self.adapters)
        if saved is not None and ranks != saved and gated and self.form.by_rank:
            raise ReshardError(
                f"{where} says that it was saved at tensor-parallel size {saved}, not {ranks}, by which the "
                "rows of gate and up lie: leave the option out"
            )
        if ranks is None and gated and self.form.by_rank:
            raise ReshardError(
                f"{where} has the rows of gate and up in an order that depends on the tensor-parallel size, "
                "which it does not say: pass --tp with the size that it was trained with"
            )
        return adapter_parameters(layers, self.form)

    def _as_recorded(self, adapters: list[Adapter]) -> list[Adapter]:
        """Return the adapters without the zeros that were written for weights without one."""
        recorded = (self.manifest() or {}).get("tensors")
        if recorded is None:
            return adapters
        kept = []
        for adapter in adapters:
            ranks = {name: rank for name, rank in adapter.ranks.items() if peft_name(name, A) in recorded}
            kept.append(replace(adapter, ranks=ranks, missing_rank=max(adapter.ranks.values())))
        return kept

    def _check_expert_tensor_parallel(self, adapters: list[Adapter]) -> None:
        """Raise ReshardError for adapters of single experts that Megatron-Bridge trained at ETP above 1: it
        multiplies by B before it has summed A's product over the ranks, which is not B @ A."""
        for directory in (self.checkpoint.directory, self.root):
            path = directory / RUN_CONFIG
            if self.form.adapter is not None or not path.is_file():
                continue
            etp = section(path, "model").get("expert_tensor_parallel_size", "")
            shared = section(path, "peft").get("share_expert_adapters", "true").lower() == "true"
            if etp.isdigit() and int(etp) > 1 and not shared and any(a.layer.of_experts for a in adapters):
                raise ReshardError(
                    f"{path}: adapters of single experts were trained at expert tensor parallelism {etp}, where what "
                    f"Megatron-Bridge computes is not B @ A: train them with expert_tensor_parallel_size=1"
                )

    def _saved_tp(self) -> int | None:
        """Return the tensor-parallel size that the checkpoint says it was saved with."""
        args = self.checkpoint.common().get("args") or {}
        size = args.get("tensor_model_parallel_size")
        for directory in (self.checkpoint.directory, self.root):
            if size is None and (directory / RUN_CONFIG).is_file():
                text = section(directory / RUN_CONFIG, "model").get("tensor_model_parallel_size", "")
                size = int(text) if text.isdigit() else None
        return size if type(size) is int and size > 0 else None

    @cached_property
    def scales(self) -> dict[str, Scale]:  # type: ignore[override]
        """The ranks and alphas by published weight. Raises ReshardError if nothing says alpha."""
        alpha, rslora = self._alpha()
        return {
            name: Scale(rank, alpha, rslora)
            for adapter in self.adapters
            for name, rank in adapter.ranks.items()
        }

    def _alpha(self) -> tuple[float, bool]:
        """Return alpha, and whether it is divided by the rank's square root. Raises ReshardError if the one that is
        given is not the checkpoint's."""
        recorded = self._recorded_alpha()
        if self.given_alpha is None:
            if recorded is not None:
                return recorded[:2]
            raise ReshardError(
                f"{self.path} does not say the adapter's alpha: there is no {RUN_CONFIG} of Megatron-Bridge and no "
                f"{CONFIG}; pass --alpha with the value that it was trained with"
            )
        given = float(self.given_alpha)
        if recorded is not None and given != recorded[0]:
            raise ReshardError(
                f"--alpha {given:g} contradicts {recorded[2]}, which says {recorded[0]:g}: leave it out"
            )
        return given, recorded is not None and recorded[1]

    def _recorded_alpha(self) -> tuple[float, bool, str] | None:
        """Return what the checkpoint says of alpha, of rsLoRA, and where; None if it says no alpha, and where a
        given one stands for what is no number."""
        for directory in (self.checkpoint.directory, self.root):
            path = directory / RUN_CONFIG
            if path.is_file() and (text := section(path, "peft").get("alpha")) is not None:
                if self.given_alpha is not None and not _is_number(text):
                    return None
                return _number(text, path), False, str(path)
            path = directory / CONFIG
            if path.is_file():
                config = read_json(path)
                check_plain(config, path)
                if config.get("alpha_pattern") and self.manifest() is None:
                    raise ReshardError(f"{path}: alpha_pattern by Megatron's names is not converted")
                alpha = as_number(config.get("lora_alpha"), "lora_alpha", path)
                return alpha, bool(config.get("use_rslora")), str(path)
        args = self.checkpoint.common().get("args") or {}
        if args.get("lora_alpha") is not None:
            where = f"{self.checkpoint.directory} (args)"
            return as_number(args["lora_alpha"], "lora_alpha", where), bool(args.get("use_rslora")), where
        return None

    def _towers(self) -> tuple[Path, dict[str, safetensors.Tensor]]:
        return self.root, {}

    def read_files(self) -> list[Path]:
        beside = [self.checkpoint.directory / CONFIG, self.root / CONFIG, self.root / RUN_CONFIG]
        return [*super().read_files(), *beside]

    def describe(self) -> dict[str, Any]:
        return super().describe() | self.described_adapter() | {"adapter_format": self.form.name}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str, where: Path) -> float:
    if not _is_number(text):
        raise ReshardError(f"{where}: peft.alpha is {text!r:.80}, not a number: pass --alpha")
    return as_number(float(text), "peft.alpha", where)
