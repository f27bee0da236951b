"""Real Megatron models with the real LoRA modules of Megatron-Bridge on a CPU: started by torchrun in an
environment with both.

    python -m tests.lora_on_cpu ACTION RESULT.pt ARGUMENTS.json
"""

import json
import sys
import zlib
from pathlib import Path

import tests.lora_imports  # noqa: F401

# isort: split
import megatron.core.parallel_state as mpu
import torch
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import dist_checkpointing

from tests import megatron_on_cpu as on_cpu

KINDS = {"lora": LoRA, "canonical": CanonicalLoRA}


def with_adapters(flags: list[str], base: str, kind: str, settings: dict):
    """Return the chunks of a model that is loaded from `base`, with Megatron-Bridge's adapters on."""
    models, args = on_cpu.build(flags)
    on_cpu.load(models, args, base)
    for model in models:
        KINDS[kind](**settings)(model, training=False)
    return [model.eval() for model in models]


def adapter_state(models) -> dict:
    """Return the sharded state of the adapters alone, as Megatron-Bridge saves and loads it."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    state = {}
    for i, model in enumerate(models):
        whole = model.sharded_state_dict(metadata={"dp_cp_group": group})
        kept = {k: v for k, v in whole.items() if ".adapter." in k and "_extra_state" not in k}
        state[f"model{i}" if len(models) > 1 else "model"] = kept
    return state


def fill(models) -> None:
    """Give every A and B numbers of its own; those of one tensor-parallel rank alike in all its replicas."""
    for model in models:
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                # Layers and experts count from this rank's first: a replica has the same name and ranks.
                place = (mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank(),
                         mpu.get_expert_model_parallel_rank() if ".experts." in name else 0)  # fmt: skip
                seed = zlib.crc32(f"{name}{place}".encode())
                numbers = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                with torch.no_grad():
                    parameter.copy_(numbers * 0.1)


def load_adapter(models, directory: str) -> None:
    """Load an adapter with Megatron's own loader, every key of which has to be there and fit."""
    state = adapter_state(models)
    wanted = {key for part in state.values() for key in part}
    loaded = dist_checkpointing.load(
        state, directory, strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL
    )
    for i, model in enumerate(models):
        part = loaded[f"model{i}" if len(models) > 1 else "model"]
        missing, unexpected = model.load_state_dict(part, strict=False)
        assert not unexpected and not [
            name for name in missing if ".adapter." in name and "_extra" not in name
        ]
    assert wanted


def save(flags, base, kind, settings, directory, tokens) -> torch.Tensor | None:
    """Save adapters of random numbers as Megatron-Bridge does; the logits with them, and without."""
    models = with_adapters(flags, base, kind, settings)
    fill(models)
    dist_checkpointing.save(adapter_state(models), directory)
    torch.distributed.barrier()
    load_adapter(models, directory)
    return on_cpu.logits(models, torch.tensor(tokens))


def load(flags, base, kind, settings, directory, tokens) -> torch.Tensor | None:
    """The logits of a model with the adapters that lie in a directory."""
    models = with_adapters(flags, base, kind, settings)
    load_adapter(models, directory)
    return on_cpu.logits(models, torch.tensor(tokens))


def main(action: str, result: str, arguments: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    output = globals()[action](**json.loads(Path(arguments).read_text()))
    if output is not None and mpu.get_tensor_model_parallel_rank() == 0:
        torch.save(output, result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
