"""Adapters that PEFT has put on transformers models of classes without a mapping table."""

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from tests.tools.model_classes import class_of

# Of the language model alone, also where a tower has layers of these names.
LANGUAGE = r"model\.(language_model\.)?layers\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def adapted(directory: str, seed: int, **settings) -> PeftModel:
    """The model of a directory with an adapter of random numbers."""
    model = getattr(transformers, class_of(directory)).from_pretrained(directory, dtype=torch.bfloat16)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LANGUAGE} | settings
    peft = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        if ".lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return peft
