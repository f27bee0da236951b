"""Real HybridModels of Megatron-Core on a CPU, and by hand what a GPTModel's weights are called in one."""

import logging
import re
from functools import partial

import megatron.core.parallel_state as mpu
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import Float16Module

import reshard
from reshard.megatron.build import build_megatron, initialize_parallel, transformer_config, without_gpu
from reshard.models.model import Model
from tests.on_cpu import megatron_on_cpu
from tests.on_cpu.live_megatron_on_cpu import spoil, unlike
from tests.on_cpu.megatron_on_cpu import KEPT
from tests.starting.ranks import caught
from tests.tools.oracle import bits

OF_GPT = ("--num-layers", "--moe-layer-freq", "--mtp-num-layers", "--linear-attention-freq",
          "--pipeline-model-parallel-layout", "--num-virtual-stages", "--decoder-first", "--decoder-last")  # fmt: skip
LINEAR = ["--experimental-attention-variant", "gated_delta_net"]


def as_hybrid(flags: list[str], pattern: str) -> list[str]:
    """The flags of the HybridModel that is a GPTModel with these."""
    kept = []
    for flag, value in zip(flags, [*flags[1:], ""]):
        if flag.startswith("--") and not flag.startswith(OF_GPT):
            if [flag, value] == LINEAR:
                continue
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


def both(flags: list[str], pattern: str, checkpoint: str, written: list[str] | None = None):
    """A GPTModel with a checkpoint's weights, by Megatron's loader, and a HybridModel with the same
    ones; the args of the latter, whose flags may be given as they were `written`."""
    gpt, args = megatron_on_cpu.build(flags)
    megatron_on_cpu.load(gpt, args, checkpoint)
    mpu.destroy_model_parallel()
    megatron_on_cpu.unset_num_microbatches_calculator()
    models, args = megatron_on_cpu.build(written or as_hybrid(flags, pattern))
    fill(models, gpt)
    return gpt, models, args


def save_hybrid(
    rank: int,
    flags: list[str],
    pattern: str,
    checkpoint: str,
    directory: str,
    tokens: torch.Tensor,
    singleton: bool = False,
):
    """Save a HybridModel with a checkpoint's weights by Megatron's code, with its args; the logits
    of both classes."""
    gpt, models, args = both(flags, pattern, checkpoint)
    megatron_on_cpu.save(
        models, directory, {"args": args}, {"singleton_local_shards": True} if singleton else None
    )
    return [megatron_on_cpu.logits(chunks, tokens) for chunks in (gpt, models)]


def save_and_load(
    rank: int,
    flags: list[str],
    written: list[str],
    gpt: str,
    theirs: str,
    hybrid: str,
    other: str,
    tokens: torch.Tensor,
):
    """Save a HybridModel, built by the flags that were written, by Megatron's code, and load two
    checkpoints of such by Megatron-LM's; the logits of both classes, the names whose weights are
    not those of a GPTModel's checkpoint, for each, and how many there are."""
    of_gpt, models, args = both(flags, "", gpt, written)
    expected = megatron_on_cpu.weights(models)
    megatron_on_cpu.save(models, theirs, {"args": args})
    logits = [megatron_on_cpu.logits(chunks, tokens) for chunks in (of_gpt, models)]
    differ = []
    for directory in (hybrid, other):
        spoil(models)
        megatron_on_cpu.load(models, args, directory)
        differ.append(unlike(megatron_on_cpu.weights(models), expected))
    return logits, *differ, len(expected)


def load_and_save_live(
    rank: int, flags: list[str], pattern: str, gpt: str, sources: list[str], other: str, folder: str
):
    """Load each of these sources into a live HybridModel, and other weights, and save it in both
    formats; the names whose weights are not those that Megatron loads of the GPTModel's checkpoint
    `gpt`, for each, how many there are, and what is exported."""
    _, models, _ = both(flags, pattern, gpt)
    for model in models:
        model.to(torch.bfloat16)
    wrapped = [Float16Module(model.config, model) for model in models]
    expected = megatron_on_cpu.weights(models)
    differ = []
    for source in (other, *sources):
        spoil(models)
        reshard.load(wrapped, source)
        differ.append(unlike(megatron_on_cpu.weights(models), expected))
    options = {"make_vocab_size_divisible_by": 8}
    reshard.save(models, f"{folder}/hf", sources[0], format="hf", **options)
    reshard.save(models, f"{folder}/mcore", sources[0], **options)
    exported = [(name, bits(tensor)) for name, tensor in reshard.export(models, sources[0], **options)]
    return differ[1:], differ[0], len(expected), exported


def mamba(
    rank: int,
    flags: list[str],
    ours: str,
    others: list[str],
    theirs: str,
    hf: str,
    folder: str,
    tokens: torch.Tensor,
):
    """Load a checkpoint with Mamba layers, and others, by Megatron's code, and save it by that; then load
    the Hugging Face directory live, save and export it. The logits of each checkpoint, the names whose
    live weights are not those of the first, how many there are, and what is exported."""
    models, args = megatron_on_cpu.build(flags)
    logits = []
    for directory in (*others, ours):
        spoil(models)
        megatron_on_cpu.load(models, args, directory)
        logits.append(megatron_on_cpu.logits(models, tokens))
    megatron_on_cpu.save(models, theirs, {"args": args})
    expected = megatron_on_cpu.weights(models)
    spoil(models)
    reshard.load(models, hf)
    differ = unlike(megatron_on_cpu.weights(models), expected)
    options = {"make_vocab_size_divisible_by": 8}
    reshard.save(models, f"{folder}/hf", hf, format="hf", **options)
    reshard.save(models, f"{folder}/mcore", hf, **options)
    exported = [(name, bits(tensor)) for name, tensor in reshard.export(models, hf, **options)]
    return logits, differ, len(expected), exported


def save_untrained(rank: int, flags: list[str], pattern: str, directory: str) -> None:
    """Save a HybridModel with Megatron's own random weights."""
    models, args = megatron_on_cpu.build(as_hybrid(flags, pattern))
    megatron_on_cpu.save(models, directory, {"args": args})


def logged_by_builds(rank: int, config: dict) -> list[list[str]]:
    """What Megatron warns of while a model of each class is built, and while a GPTModel is built
    without `build_megatron`."""
    KEPT.enter_context(without_gpu())
    layout, model = reshard.MegatronLayout(), Model.from_hf(config)
    initialize_parallel(layout)
    logged: list[list[str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged[-1].append(record.getMessage())
    logging.getLogger("megatron").addHandler(handler)
    for model_class in ("gpt", "hybrid"):
        logged.append([])
        build_megatron(model, layout, transformer_impl="local", model_class=model_class)
    logged.append([])
    gpt_config = transformer_config(model, layout, transformer_impl="local")
    spec = get_gpt_decoder_block_spec(gpt_config, use_transformer_engine=False, normalization="RMSNorm")
    GPTModel(gpt_config, spec, vocab_size=128, max_sequence_length=8)
    return logged


def refused_live(rank: int, cases: list[tuple[list[str], str, str]]) -> list[str]:
    """What is said where HybridModels with these flags and patterns are loaded from these sources."""
    said = []
    for flags, pattern, source in cases:
        mpu.destroy_model_parallel()
        megatron_on_cpu.unset_num_microbatches_calculator()
        models, _ = megatron_on_cpu.build(as_hybrid(flags, pattern))
        said.append(caught(partial(reshard.load, models, source)))
    return said


def apart(rank: int, flags: list[str], pattern: str, hf: str, folder: str):
    """Load a HybridModel in which a pipeline stage ends between an attention and its MLP; what it
    exports, what is said of a save, and what that writes for another layout."""
    models, _ = megatron_on_cpu.build(as_hybrid(flags, pattern))
    for model in models:
        model.to(torch.bfloat16)
    spoil(models)
    reshard.load(models, hf)
    options = {"make_vocab_size_divisible_by": 8}
    said = caught(partial(reshard.save, models, f"{folder}/mcore", hf, **options))
    reshard.save(models, f"{folder}/given", hf, layout=reshard.MegatronLayout(pp=2), **options)
    return [(name, bits(tensor)) for name, tensor in reshard.export(models, hf, **options)], said
