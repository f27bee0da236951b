"""Prompts with an image, for small models of Qwen's classes with a vision tower: what vLLM reads beside the weights to
make pixels of an image, and the same pixels for a trainer."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.tools.model_classes import CLASSES, MROPE, SIZES, WITH_TOWER, make

# Heads of 32: vLLM's build for the CPU has no attention for smaller ones.
SERVED = SIZES | dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
MARKS = {400: "<|image_pad|>", 401: "<|video_pad|>", 402: "<|vision_start|>", 403: "<|vision_end|>"}
PATCH, MERGED = 14, 2
# What is asked of a picture: text around the place of an image, which becomes as many tokens as it has patches.
PROMPTS = [[5, 6, 402, 400, 403, 7, 8], [9, 402, 400, 403, 10, 11, 12, 13]]


def make_served(directory: Path, name: str, seed: int = 0, **options) -> Path:
    """Save a small model of a class that vLLM's build for the CPU serves, with all that vLLM reads beside it."""
    text = (CLASSES | WITH_TOWER)[name]["text_config"]
    rope = text.get("rope_parameters", MROPE) | {"mrope_section": [6, 5, 5]}
    if "layer_types" in text:  # Qwen3.5's, which turns a quarter of each head
        rope = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    make(directory, name, seed, text_config=text | SERVED | {"rope_parameters": rope}, **options)
    processor_of(name).save_pretrained(directory)
    return directory


def processor_of(name: str):
    """A processor of images and of words that are numbers; without a hub."""
    words = {MARKS.get(number, f"w{number}"): number for number in range(SIZES["vocab_size"])}
    named = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        unk_token="w0", eos_token="w1", pad_token="w2", additional_special_tokens=[*MARKS.values()],
    )  # fmt: skip
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGED}
    one = (PATCH * MERGED) ** 2
    images = transformers.Qwen2VLImageProcessor(
        **sizes, size={"shortest_edge": one, "longest_edge": 16 * one}
    )
    of_qwen2 = "Qwen2" in name
    videos = transformers.Qwen2VLVideoProcessor if of_qwen2 else transformers.Qwen3VLVideoProcessor
    kind = transformers.Qwen2_5_VLProcessor if of_qwen2 else transformers.Qwen3VLProcessor
    return kind(image_processor=images, tokenizer=named, video_processor=videos(**sizes))


def picture(seed: int) -> Image.Image:
    """A picture of six tokens."""
    side = PATCH * MERGED
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (2 * side, 3 * side, 3), dtype=np.uint8)
    )


def asked(prompt: list[int], image: Image.Image) -> dict:
    """A prompt with its image, as vLLM takes it."""
    return {"prompt_token_ids": prompt, "multi_modal_data": {"image": image}}


def as_trained(
    directory: Path, prompt: list[int], image: Image.Image, answers: list[list[int]]
) -> dict[str, torch.Tensor]:
    """A prompt with its image and each of several answers, of the same length, as a transformers model takes them."""
    processor = transformers.Qwen2VLImageProcessor.from_pretrained(directory)
    pixels = processor(images=[image], return_tensors="pt")
    config = json.loads((Path(directory) / "config.json").read_text())
    count, place = int(pixels["image_grid_thw"].prod()) // MERGED**2, config["image_token_id"]
    at = prompt.index(place)
    tokens = torch.tensor(
        [[*prompt[:at], *[place] * count, *prompt[at + 1 :], *answer] for answer in answers]
    )
    repeated = {
        "pixel_values": pixels["pixel_values"].repeat(len(answers), 1),
        "image_grid_thw": pixels["image_grid_thw"].repeat(len(answers), 1),
    }
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == place).int()} | repeated
