"""Train a small mixture of experts for a few minutes, so that its routers are not random: on a GPU or a CPU.

    python -m tests.tools.trained_moe DIRECTORY [--steps 300] [--config config.json --tokenizer tokenizer.json]

The text is the source code of Python's standard library, by bytes, or by the tokens of a tokenizer. What comes out is a
Qwen3-MoE in bf16. Routers are trained by the loss of the next token alone, with a small loss that balances experts.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

# With bytes as tokens; large enough for vLLM's kernels on a CPU.
SMALL = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 128,
    "max_position_embeddings": 512, "norm_topk_prob": True, "tie_word_embeddings": False, "decoder_sparse_step": 1,
}  # fmt: skip


def text(size: int) -> str:
    """Return the first `size` characters of the standard library's modules, in the order of their names."""
    parts, length = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
        if length >= size:
            break
    return "".join(parts)[:size]


def tokens_of(written: str, tokenizer: str | None = None) -> torch.Tensor:
    """Return the tokens ``[count]`` of a text: its bytes, or those of a ``tokenizer.json``."""
    if tokenizer is None:
        return torch.frombuffer(bytearray(written.encode()), dtype=torch.uint8).long()
    from tokenizers import Tokenizer

    lines = written.splitlines(keepends=True)
    encoded = Tokenizer.from_file(tokenizer).encode_batch(lines, add_special_tokens=False)
    return torch.tensor([token for line in encoded for token in line.ids])


def train(
    config: Qwen3MoeConfig,
    tokens: torch.Tensor,
    steps: int,
    batch: int,
    length: int,
    seconds: float = 1e9,
    experts: str | None = None,
) -> Qwen3MoeForCausalLM:
    """Return a model that has been trained for that many steps of `batch` sequences of `length` tokens, or that many
    seconds; `experts` is how transformers runs them."""
    options = {} if experts is None else {"experts_implementation": experts}
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Qwen3MoeForCausalLM._from_config(config, dtype=dtype, **options)
    held = list(model.parameters())
    trained = [parameter.detach().float().requires_grad_() for parameter in held]  # on a CPU the same memory
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda")
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4 if config.hidden_size > 1024 else 3e-3, steps)
    began, generator = time.monotonic(), torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        chosen = torch.stack([tokens[start : start + length] for start in starts.tolist()]).to(device)
        loss = model(chosen, labels=chosen, use_cache=False, output_router_logits=True).loss
        loss.backward()
        for own, parameter in zip(trained, held, strict=True):
            own.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rates.step()
        with torch.no_grad():
            torch._foreach_copy_(held, trained)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() - began > seconds:
            break
    return model


def make(directory: Path, steps: int = 300, batch: int = 16, length: int = 128) -> Path:
    """Write the small model to `directory` as a Hugging Face checkpoint in bf16, and return it."""
    model = train(Qwen3MoeConfig(**SMALL), tokens_of(text(1 << 20)), steps, batch, length)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts of tokens that the small model was not trained on, but are of the same kind."""
    unseen = tokens_of(text(1 << 22)[1 << 20 :])
    return [unseen[i * 5000 : i * 5000 + length].tolist() for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts for a few minutes.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--experts", help="transformers' implementation, such as eager")
    given = parser.parse_args()
    fields = json.loads(given.config.read_text()) if given.config else SMALL
    tokens = tokens_of(text(1 << 24 if given.tokenizer else 1 << 20), given.tokenizer)
    print(f"{len(tokens):,} tokens", flush=True)
    config, sizes = Qwen3MoeConfig(**fields), (given.steps, given.batch, given.length)
    model = train(config, tokens, *sizes, given.seconds, given.experts)
    model.to(torch.bfloat16).save_pretrained(given.directory)


if __name__ == "__main__":
    main()
