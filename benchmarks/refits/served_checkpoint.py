"""A checkpoint of the trainer's weights that an engine loads by its own loader, in bf16 or in fp8 blocks: for
`benchmarks.refits.sglang`."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist


def write_checkpoint(models: list, config: dict, folder: Path, in_blocks: bool) -> None:
    """Write the trainer's weights as a Hugging Face directory, from the first rank."""
    from reshard import export
    from reshard.models.model import Model

    rank = dist.get_rank()
    tensors = {name: tensor.cpu() for name, tensor in export(models, folder.parent, to=0)}
    if rank == 0:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        if in_blocks:
            quantized = Model.from_hf(config).quantizable() & tensors.keys()
            tensors = dict(blocks_of(tensors, quantized))
        if "vision_config" in config:
            tensors |= dict(tower_of(config))
            write_processor(folder)
        (folder / "config.json").write_text(json.dumps(served_config(config, in_blocks)), encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()


def tower_of(config: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of a config's vision tower, with the published names, and the same values each time."""
    import transformers

    with torch.device("meta"):
        kind = getattr(transformers, config["architectures"][0])
        shapes = {
            name: tensor.shape for name, tensor in kind(kind.config_class(**config)).state_dict().items()
        }
    generator = torch.Generator().manual_seed(7)
    for name, shape in shapes.items():
        if name.startswith("model.visual."):
            yield name, (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def write_processor(folder: Path) -> None:
    """Write what an engine needs to take images: a processor as Qwen3-VL's, with a tokenizer of one word."""
    from tokenizers import Tokenizer, models
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    words = ("<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])),
        unk_token=words[0],
        extra_special_tokens={
            "image_token": words[1],
            "video_token": words[2],
            "vision_start_token": words[3],
            "vision_end_token": words[4],
        },
    )
    Qwen3VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor()).save_pretrained(folder)


def blocks_of(tensors: dict[str, torch.Tensor], quantized: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, those of `quantized` as codes and scales of blocks."""
    from reshard.quantization.fp8_blocks import SCALE_SUFFIX, encode

    def encoded(name: str) -> list[tuple[str, torch.Tensor]]:
        codes, scales = encode(tensors[name].float().numpy())
        as_bytes = torch.from_numpy(codes.view("uint8").copy())
        return [
            (name, as_bytes.view(torch.float8_e4m3fn)),
            (name + SCALE_SUFFIX, torch.from_numpy(scales.copy())),
        ]

    yield from ((name, tensor) for name, tensor in tensors.items() if name not in quantized)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for pairs in pool.map(encoded, sorted(quantized)):
            yield from pairs


def served_config(config: dict, in_blocks: bool) -> dict:
    """Return the config that SGLang serves."""
    if not in_blocks:
        return config
    from reshard.megatron.parameters import expand
    from reshard.models.model import Model
    from reshard.quantization.fp8_blocks import Fp8Blocks, config_of

    model = Model.from_hf(config)
    shapes = expand(model).shapes
    plain = [name for name, shape in shapes.items() if len(shape) == 2 and name not in model.quantizable()]
    return config | {
        "quantization_config": config_of(Fp8Blocks(), None, [name.removesuffix(".weight") for name in plain])
    }
