"""Why do Megatron-Core and vLLM differ on a GPU? A trained mixture of experts of Qwen3-30B-A3B's widths.

    python -m benchmarks.parity.causes train DIR --tokenizer tokenizer.json
    python -m benchmarks.parity.causes run DIR bf16 [--json FILE]    # or batched, fp8, fp32
    VLLM_BATCH_INVARIANT=1 python -m benchmarks.parity.causes run DIR bf16

Six layers and a vocabulary of 49,152 leave room for the optimizer on one GPU. Random routers hide what trained ones
show: there the best experts are hardly apart. Prompts are source code of torch, which the model was not trained on.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig

from reshard import hf_to_mcore
from reshard.parity import parity
from tests.tools.trained_moe import text, tokens_of, train

WIDTHS = {
    "vocab_size": 49152, "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "max_position_embeddings": 4096, "norm_topk_prob": True,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
LENGTHS = (1024, 512, 512, 256, 256, 128, 128, 64)
RUNS = {
    "bf16": {"dtype": "bf16"},
    "batched": {"dtype": "bf16", "batch_size": 4},
    "fp8": {"dtype": "bf16", "quantization": "fp8_per_block"},
    "fp32": {"dtype": "fp32"},
}


def prepare(directory: Path, tokenizer: str, seconds: float) -> None:
    """Train the model, and write it in both formats, and prompts."""
    tokens = tokens_of(text(1 << 24), tokenizer)
    model = train(Qwen3MoeConfig(**WIDTHS), tokens, steps=1200, batch=16, length=512, seconds=seconds)
    model.save_pretrained(directory / "hf")
    print(hf_to_mcore(directory / "hf", directory / "mcore"))
    modules = sorted((Path(torch.__file__).parent / "nn" / "modules").glob("*.py"))
    long = [file.read_text()[4000:20000] for file in modules if file.stat().st_size > 20000]
    prompts = [tokens_of(part, tokenizer)[:n].tolist() for part, n in zip(long, LENGTHS)]
    (directory / "prompts.json").write_text(json.dumps(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Why do Megatron-Core and vLLM differ?")
    parser.add_argument("what", choices=["train", "run"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("name", nargs="?", choices=RUNS)
    parser.add_argument("--tokenizer")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    directory = given.directory
    if given.what == "train":
        return prepare(directory, given.tokenizer, given.seconds)
    prompts = json.loads((directory / "prompts.json").read_text())
    options = {"reach": False, "noise": False, "why": True} | RUNS[given.name]
    report = parity(directory / "mcore", f"vllm:{directory / 'hf'}", prompts, **options)
    print(report)
    if given.json is not None:
        given.json.write_text(json.dumps(report.to_dict(), default=str))


if __name__ == "__main__":
    main()
