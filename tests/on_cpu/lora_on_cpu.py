"""Real Megatron models with the real LoRA modules of Megatron-Bridge on a CPU: started by torchrun in an
environment with both.

    python -m tests.on_cpu.lora_on_cpu ACTION RESULT.pt ARGUMENTS.json
"""

import json
import sys
import zlib
from pathlib import Path
from unittest.mock import MagicMock

import tests.starting.lora_imports  # noqa: F401

# isort: split
import megatron.core.parallel_state as mpu
import torch
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import dist_checkpointing

from tests.on_cpu import megatron_on_cpu as on_cpu

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


def fill(models, within: str = ".adapter.") -> None:
    """Give every A and B numbers of its own; those of one tensor-parallel rank alike in all its replicas."""
    for model in models:
        for name, parameter in model.named_parameters():
            if within in name:
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


def transformer_engine_model(flags: list[str], base: str):
    """Return the chunk of a model of Transformer Engine's layers, which hold their parameters and compute nothing,
    loaded from `base`."""
    from tests.on_cpu.swift_on_cpu import OnCpu

    OnCpu().__enter__()  # until this process ends
    args = on_cpu.parse(flags, torch.distributed.get_world_size())
    torch.cuda.is_available = lambda: True
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()
    args.padded_vocab_size = args.padded_vocab_size or on_cpu.vocab_size_with_padding(
        args.vocab_size, args, logging_enabled=False
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    config = on_cpu.core_transformer_config_from_args(args)
    config.use_cpu_initialization, config.perform_initialization = True, True
    config.transformer_impl = "transformer_engine"
    model = on_cpu.GPTModel(
        config,
        on_cpu.get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
    )
    kept = {k: v for k, v in sharded(model).items() if "_extra_state" not in k}
    loaded = dist_checkpointing.load({"model": kept}, base)["model"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    return model


def sharded(model) -> dict:
    return model.sharded_state_dict(
        metadata={"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    )


def wrap(model, targets: list[str], **settings) -> None:
    """Put mcore-bridge's LoRA on the layers of these names, as PEFT does it for ms-swift."""
    from mcore_bridge.tuners.lora import LoraParallelLinear

    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if name in targets:
                child.is_expert = (
                    ".experts" in path and ".shared_experts" not in path
                )  # as mcore-bridge sets it
                setattr(parent, name, LoraParallelLinear(child, "default", lora_dropout=0.0, **settings))


def mcore_bridge(saves, flags, base, targets, settings, directory, merged) -> None:
    """Save adapters of random numbers as ms-swift does where it `saves`; load those of the directory
    with Megatron's own loader, all of whose keys have to fit, and save the model with their sum."""
    model = transformer_engine_model(flags, base)
    wrap(model, targets, **settings)
    if saves:
        fill([model], ".lora_")
        kept = {k: v for k, v in sharded(model).items() if ".lora_A." in k or ".lora_B." in k}
        dist_checkpointing.save({"model": kept, "iteration": 5}, directory)
        torch.distributed.barrier()
    kept = {
        k: v
        for k, v in sharded(model).items()
        if (".lora_A." in k or ".lora_B." in k) and "_extra_state" not in k
    }
    loaded = dist_checkpointing.load({"model": kept}, directory)["model"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and not [name for name in missing if ".lora_" in name and "_extra" not in name]
    for module in model.modules():
        if hasattr(module, "get_delta_weights"):
            module.merge()
    own = {k: v for k, v in sharded(model).items() if ".lora_" not in k and "_extra_state" not in k}
    dist_checkpointing.save({"model": own, "iteration": 5}, merged)


def grouped(saves, flags, base, settings, directory, legacy=False) -> None:
    """Save Megatron-Bridge's adapters of grouped experts, or load them, every one of whose keys has to fit. With
    `legacy` a shared one has no dim for the expert, as its older releases saved it and this one loads it."""
    model = transformer_engine_model(flags, base)
    LoRA(**settings)(model, training=False)
    for module in model.modules():
        if hasattr(module, "use_legacy_shared_expert_adapter_checkpoint"):
            module.use_legacy_shared_expert_adapter_checkpoint = legacy
    if saves:
        fill([model])
        dist_checkpointing.save(adapter_state([model]), directory)
        torch.distributed.barrier()
    load_adapter([model], directory)


def main(action: str, result: str, arguments: str, actions: dict | None = None) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    output = (actions or globals())[action](**json.loads(Path(arguments).read_text()))
    outputs: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(outputs, output is not None)
    writer = outputs.index(True) if True in outputs else None  # one rank writes the file, and always the same
    if torch.distributed.get_rank() == writer:
        torch.save(output, result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
