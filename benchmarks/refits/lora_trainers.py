"""Trainers with a LoRA adapter for `benchmarks.refits.lora`: a transformers model with PEFT's, and a Megatron model
of mcore-bridge with its LoRA, as ms-swift puts it on. Weights and adapters are random.

Each gives the source of a refit, the adapter as its framework's own sync collects it, the logprobs of prompts, and
the merge of the adapter into the weights."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.processes import device, say
from reshard.refit.trainer import Trainer

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STD_A, STD_B = 0.02, 0.005  # a change of a few percent of the weights, whose own is 0.02


def fill(name: str, parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
    """Fill a parameter with random numbers that its name decides."""
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        parameter.normal_(mean, std, generator=generator)


def is_adapter(name: str) -> bool:
    """Return True for a parameter of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def change(model: torch.nn.Module) -> None:
    """Give a model's adapter numbers that differ a little, as an optimizer's step does; cheaper than `step`."""
    parameters = [local(p).detach() for name, p in model.named_parameters() if is_adapter(name)]
    torch._foreach_mul_(parameters, 1.01)


def scored(logits: torch.Tensor, tokens: torch.Tensor) -> list[list[float]]:
    """Return the logprobs of all tokens but the first, given the logits ``[prompts, tokens, vocabulary]``."""
    own = logits[:, :-1].float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return own.tolist()


def save_collected(trainer: "PeftTrainer | McoreTrainer", folder: Path) -> None:
    """Save a trainer's adapter, collected, in PEFT's files; by the first rank."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in trainer.collected().items()}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        described = json.dumps(trainer.settings | {"peft_type": "LORA"})
        (folder / "adapter_config.json").write_text(described, encoding="utf-8")
    dist.barrier()


class PeftTrainer:
    """A transformers model in bf16 with PEFT's adapter on all linear layers: in fp32 in one process, and in bf16 in
    several, under FSDP2."""

    def __init__(self, folder: Path, rank: int) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device(device()):
            plain = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        for name, parameter in plain.named_parameters():
            fill(name, parameter, 0.02, 1.0 if "norm" in name else 0.0)
        settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEAR))
        self._ranks = dist.get_world_size()
        self.model: Any = get_peft_model(plain, settings, autocast_adapter_dtype=self._ranks == 1).eval()
        if self._ranks > 1:
            mesh = init_device_mesh(device(), (self._ranks,))
            for module in (*plain.model.layers, self.model):
                fully_shard(module, mesh=mesh)
        self.settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(LINEAR), "bias": "none"}

    def source(self) -> Trainer:
        """Return the source of a refit."""
        from reshard.trainers.fsdp import FsdpModel

        return FsdpModel(self.model)

    def step(self, number: int) -> None:
        """Give the adapter the numbers of a step."""
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                own = local(parameter)
                where = dist.get_rank() if own is not parameter else 0
                fill(f"{name} {where} {number}", own, STD_A if ".lora_A." in name else STD_B)

    def collected(self) -> dict[str, torch.Tensor]:
        """Return the whole adapter under PEFT's names, as trainers collect it for an engine."""
        from peft import get_peft_model_state_dict

        tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(self.model)
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
            .detach()
            .to(torch.bfloat16)
            for name, tensor in tensors.items()
        }

    def save(self, folder: Path) -> None:
        """Save the adapter, in one process as PEFT does."""
        if self._ranks > 1:
            save_collected(self, folder)
        else:
            self.model.save_pretrained(folder)

    def merge(self) -> None:
        """Add the adapter to the weights."""
        self.model.merge_adapter()

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor) -> list[list[float]]:
        """Return the logprobs of all tokens but the first of each prompt ``[prompts, tokens]``."""
        tokens = tokens.to(device())
        rows: list[list[float]] = []
        for prompt in tokens.split(1):
            rows += scored(self.model(prompt).logits, prompt)
        return rows


class McoreTrainer:
    """A rank of a Megatron model as mcore-bridge makes it, in bf16, with its LoRA on all linear layers."""

    def __init__(self, folder: Path, rank: int, layout: Any) -> None:
        from mcore_bridge import get_mcore_model
        from peft import LoraConfig, get_peft_model

        from reshard.megatron.build import initialize_parallel

        initialize_parallel(layout)
        config = _config_of_bridge(folder, layout)
        [plain] = get_mcore_model(config)
        plain.to(device(), torch.bfloat16)
        plain.requires_grad_(False)
        self.bridge = config.bridge
        targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
        settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.model: Any = get_peft_model(plain, settings, autocast_adapter_dtype=False).eval()
        self._place = _place_of(layout)
        for name, parameter in self.model.named_parameters():
            self._fill(name, parameter, 0.02, 1.0 if "norm" in name else 0.0)
        self.settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(LINEAR), "bias": "none"}
        self._chunk = _in_ddp(config, self.model)

    def _fill(self, name: str, parameter: torch.Tensor, std: float, mean: float = 0.0, step: int = 0) -> None:
        """Fill a parameter, alike on ranks that hold the same."""
        tp, ep = self._place
        split = getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name
        place = (tp if split else 0, ep if ".experts." in name else 0)
        fill(f"{name} {place} {step}", parameter, std, mean)

    def source(self) -> Trainer:
        """Return the source of a refit."""
        from reshard.integrations.swift import SwiftModel

        return SwiftModel([self._chunk])

    def step(self, number: int) -> None:
        """Give the adapter the numbers of a step."""
        for name, parameter in self.model.named_parameters():
            if is_adapter(name):
                self._fill(name, parameter, STD_A if ".lora_A." in name else STD_B, step=number)

    def collected(self) -> dict[str, torch.Tensor]:
        """Return the whole adapter under PEFT's names, by mcore-bridge's own export, on every rank."""
        exported: Iterator[tuple[str, torch.Tensor]] = self.bridge.export_weights(
            [self.model], peft_format=True
        )
        return {name: tensor.detach() for name, tensor in exported}

    def save(self, folder: Path) -> None:
        """Save the adapter, collected, in PEFT's files."""
        save_collected(self, folder)

    def merge(self) -> None:
        """Add the adapter to the weights, as ms-swift does before a sync of merged weights."""
        for module in self.model.modules():
            if hasattr(module, "get_delta_weights"):
                module.merge()

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor) -> list[list[float]]:
        """Return the logprobs of all tokens but the first of each prompt ``[prompts, tokens]``."""
        tokens = tokens.to(device())
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)[None]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        model = self.model.base_model.model
        rows: list[list[float]] = []
        for prompt in tokens.split(1):
            rows += scored(model(prompt, positions, mask, runtime_gather_output=True), prompt)
        return rows


def _in_ddp(config: Any, model: torch.nn.Module) -> torch.nn.Module:
    """Return a model in DDP as ms-swift wraps it, with the adapter in the distributed optimizer's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    options = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=None)
    chunk: torch.nn.Module = DistributedDataParallel(config, options, Float16Module(config, model))
    return chunk


def _config_of_bridge(folder: Path, layout: Any) -> Any:
    """Return mcore-bridge's config of a Hugging Face directory for a layout."""
    from mcore_bridge import ModelConfig, hf_to_mcore_config
    from megatron.core.transformer.enums import AttnBackend
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder)
    options = hf_to_mcore_config(hf_config) | {
        "hf_config": hf_config,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "attention_backend": AttnBackend.unfused,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or 1,
    }
    return ModelConfig(**options)


def _place_of(layout: Any) -> tuple[int, int]:
    """Return this process's tensor parallel and expert parallel rank."""
    import megatron.core.parallel_state as mpu

    return mpu.get_tensor_model_parallel_rank(), mpu.get_expert_model_parallel_rank()


def trainer_of(kind: str, folder: Path, rank: int, layout: Any) -> PeftTrainer | McoreTrainer:
    """Return a trainer: ``peft`` or ``mcore-bridge``."""
    trainer = PeftTrainer(folder, rank) if kind == "peft" else McoreTrainer(folder, rank, layout)
    count = sum(is_adapter(name) for name, _ in trainer.model.named_parameters())
    say(f"{kind} trainer: {count} parameters of the adapter on the first rank")
    return trainer
