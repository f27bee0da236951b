"""A refit without a GPU: a real Megatron model trains a few steps, and vLLM's real model class gets its weights after each.

    torchrun --nproc-per-node 2 examples/refit_on_cpu.py

Trainer and engine share the two processes (Megatron TP2 to vLLM PP2); bytes travel over Gloo. vLLM's kernels need a GPU, so nothing is
generated: after each refit the digests of both sides are compared.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

import torch
import torch.distributed as dist

# Qwen3's published fields at small sizes.
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
          "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
          "attention_bias": False, "torch_dtype": "bfloat16"}  # fmt: skip


def train(models: list[torch.nn.Module], engine, steps: int) -> None:
    """The loop of a trainer: connect once, refit after each step."""
    from reshard.live.megatron import MegatronModel
    from reshard.refit import Members, connect

    link = connect(Members.of_process_group(), source=MegatronModel(models), destination=engine)
    tokens = torch.arange(40).reshape(2, 20)
    positions, mask = torch.arange(20).expand(2, 20), torch.ones(20, 20, dtype=torch.bool).triu(1)[None, None]
    for step in range(steps):
        loss = models[0](tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        for parameter in models[0].parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        report = link.refit(version=step, verify=True)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, version {engine.version}, {report.local_bytes:,} bytes stayed in the process, "
                  f"{report.bucket_bytes:,} came over Gloo, {report.transfer_seconds * 1e3:.1f} ms")  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    from reshard import Layout, read_model
    from reshard.live.build import build_megatron, initialize_parallel, without_gpu
    from reshard.live.vllm import VllmModel

    # A helper of the tests: it builds vLLM's model classes on a platform without a GPU.
    from tests import vllm_on_cpu

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        model, config = vllm_on_cpu.build(folder, pp=2, load_format="dummy")
        layout = Layout(tp=2)
        options = {"transformer_impl": "local", "use_cpu_initialization": True, "masked_softmax_fusion": False}
        with without_gpu():
            initialize_parallel(layout)
            chunks = build_megatron(read_model(folder), layout, **options)
            train([chunk.bfloat16() for chunk in chunks], VllmModel(model, config), steps=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
