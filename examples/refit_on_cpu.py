"""A refit without a GPU: a Megatron model trains a few steps, and a vLLM serves its weights after each.

    torchrun --nproc-per-node 2 examples/refit_on_cpu.py

Trainer and engine share the two processes (Megatron TP2 to vLLM PP2); bytes travel over Gloo. It needs vLLM's build for the CPU.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "TORCHDYNAMO_DISABLE": "1", "VLLM_DIST_IDENT": f"example-{os.getppid()}"}  # fmt: skip

import torch
import torch.distributed as dist

# Qwen3's published fields at small sizes.
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
          "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
          "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
          "attention_bias": False, "torch_dtype": "bfloat16"}  # fmt: skip


def train(models: list[torch.nn.Module], llm, steps: int) -> None:
    """The loop of a trainer: connect once, refit after each step."""
    from vllm import SamplingParams

    from reshard.live.megatron import MegatronModel
    from reshard.live.vllm import VllmModel
    from reshard.refit import Members, connect

    link = connect(Members.of_process_group(), source=MegatronModel(models), destination=VllmModel.from_llm(llm))
    tokens = torch.arange(40).reshape(2, 20)
    positions, mask = torch.arange(20).expand(2, 20), torch.ones(20, 20, dtype=torch.bool).triu(1)[None, None]
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    for step in range(steps):
        loss = models[0](tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        for parameter in models[0].parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        report = link.refit(version=step, verify=True)
        llm.reset_prefix_cache()  # what it remembers was computed from the old weights
        [output] = llm.generate([{"prompt_token_ids": list(range(5, 25))}], greedy, use_tqdm=False)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, version {report.version}, {report.local_bytes:,} bytes stayed in the process, "
                  f"{report.bucket_bytes:,} came over Gloo in {report.transfer_seconds * 1e3:.1f} ms, "
                  f"then {output.outputs[0].token_ids}")  # fmt: skip


def main() -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    from vllm import LLM

    from reshard import Layout, read_model
    from reshard.live.build import build_megatron, initialize_parallel, without_gpu
    from reshard.live.cpu_engine import keep_weights_plain

    keep_weights_plain()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        llm = LLM(folder, load_format="dummy", dtype="bfloat16", pipeline_parallel_size=2, distributed_executor_backend="external_launcher",
                  skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 27, seed=0)  # fmt: skip
        layout = Layout(tp=2)
        options = {"transformer_impl": "local", "use_cpu_initialization": True, "masked_softmax_fusion": False}
        with without_gpu():
            initialize_parallel(layout)
            chunks = build_megatron(read_model(folder), layout, **options)
            train([chunk.bfloat16() for chunk in chunks], llm, steps=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
