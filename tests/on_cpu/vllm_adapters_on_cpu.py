"""vLLM's real model classes with its own wrappers for adapters, and what its own loading of PEFT's files puts into
their slots, on a CPU."""

from types import SimpleNamespace

from tests.on_cpu import vllm_on_cpu  # before vLLM, whose platform it says

# isort: split
import torch
from vllm.config import set_current_vllm_config
from vllm.lora import lora_model, lora_weights, model_manager
from vllm.lora.request import LoRARequest
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from tests.tools import refit_sides

for module in (lora_model, lora_weights, model_manager):
    module.PIN_MEMORY = False  # which takes a GPU


def engine_with_adapters(hf: str, packed: bool = False, **options):
    """vLLM's model with its layers wrapped, its config, and what loads adapters for a worker's requests; with one
    adapter for gate and up of all experts where they are `packed`, as in classes that say so."""
    vllm_on_cpu.choose_triton()
    if packed:
        from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

        Qwen3MoeForCausalLM.is_3d_moe_weight = True  # until this process ends
    module, config = vllm_on_cpu.build(hf, enable_lora=True, load_format="dummy", **options)
    runner = SimpleNamespace()
    with set_current_vllm_config(config):
        module = LoRAModelRunnerMixin.load_lora_model(runner, module, config, torch.device("cpu"))
    return module, config, runner.lora_manager


def slot_bits(module, slot: int) -> dict[str, tuple]:
    """The bits of everything that vLLM holds of adapters in a slot, by the layer's name."""
    found = {}
    for name, layer in module.lora_manager.modules.items():
        for key, held in vars(layer).items():
            if name == "lm_head" and key in ("lora_a_stacked", "lora_b_stacked"):
                found[f"{name}.{key}"] = refit_sides.bits_of(held[slot])
            if key.endswith("_stacked") and isinstance(held, tuple):
                found |= {f"{name}.{key}.{i}": refit_sides.bits_of(t[slot]) for i, t in enumerate(held)}
        if hasattr(layer, "adapter_enabled"):
            found[f"{name}.enabled"] = int(layer.adapter_enabled[slot])
    return found


def loaded_by_vllm(module, loader, name: str, number: int, directory: str) -> dict[str, tuple]:
    """What vLLM's own loading of a directory puts into a slot."""
    assert loader.add_adapter(LoRARequest(name, number, directory))
    found = slot_bits(module, module.lora_manager.lora_index_to_id.index(number))
    loader.remove_adapter(number)
    return found
