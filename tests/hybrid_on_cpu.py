"""Real HybridModels of Megatron-Core on a CPU, and by hand what a GPTModel's weights are called in one."""

import re

import megatron.core.parallel_state as mpu
import torch

from tests import megatron_on_cpu

OF_GPT = ("--num-layers", "--moe-layer-freq", "--mtp-num-layers", "--linear-attention-freq", "--pipeline-model-parallel-layout",
          "--num-virtual-stages", "--decoder-first", "--decoder-last")  # fmt: skip


def as_hybrid(flags: list[str], pattern: str) -> list[str]:
    """The flags of the HybridModel that is a GPTModel with these."""
    kept = []
    for flag, value in zip(flags, [*flags[1:], ""]):
        if flag.startswith("--") and not flag.startswith(OF_GPT):
            kept += [flag] if value.startswith("--") or not value else [flag, value]
    return [*kept, "--hybrid-layer-pattern", pattern]


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A live GPTModel's weights under a HybridModel's names."""

    def name_of(name: str) -> str:
        half = int(".mlp." in name or ".pre_mlp_layernorm." in name)
        name = re.sub(
            r"(decoder\.layers\.)(\d+)\.", lambda match: f"{match[1]}{2 * int(match[2]) + half}.", name
        )
        name = re.sub(r"(mtp\.layers\.\d+\.mtp_model_layer\.)", rf"\g<1>layers.{half}.", name)
        return name.replace("decoder.final_layernorm.", "decoder.final_norm.")

    return {name_of(name): tensor for name, tensor in weights.items()}


def fill(models, gpt: list) -> None:
    """Put a GPTModel's weights into a HybridModel at the same layout."""
    for chunk, filled in zip(models, gpt, strict=True):
        state = renamed({name: t for name, t in filled.state_dict().items() if isinstance(t, torch.Tensor)})
        own = {name for name, tensor in chunk.state_dict().items() if isinstance(tensor, torch.Tensor)}
        assert own == state.keys(), own ^ state.keys()
        chunk.load_state_dict(state, strict=False)


def both(flags: list[str], pattern: str, checkpoint: str):
    """A GPTModel with a checkpoint's weights, by Megatron's loader, and a HybridModel with the same ones; the args of the latter."""
    gpt, args = megatron_on_cpu.build(flags)
    megatron_on_cpu.load(gpt, args, checkpoint)
    mpu.destroy_model_parallel()
    megatron_on_cpu.unset_num_microbatches_calculator()
    models, args = megatron_on_cpu.build(as_hybrid(flags, pattern))
    fill(models, gpt)
    return gpt, models, args


def save_hybrid(
    rank: int, flags: list[str], pattern: str, checkpoint: str, directory: str, tokens: torch.Tensor, singleton: bool = False
):  # fmt: skip
    """Save a HybridModel with a checkpoint's weights by Megatron's code, with its args; the logits of both classes."""
    gpt, models, args = both(flags, pattern, checkpoint)
    megatron_on_cpu.save(
        models, directory, {"args": args}, {"singleton_local_shards": True} if singleton else None
    )
    return [megatron_on_cpu.logits(chunks, tokens) for chunks in (gpt, models)]


def save_untrained(rank: int, flags: list[str], pattern: str, directory: str) -> None:
    """Save a HybridModel with Megatron's own random weights."""
    models, args = megatron_on_cpu.build(as_hybrid(flags, pattern))
    megatron_on_cpu.save(models, directory, {"args": args})
