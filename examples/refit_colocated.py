"""Trainer and vLLM in the same processes: after each training step vLLM serves the new weights.

    torchrun --nproc-per-node 2 examples/refit_colocated.py [MODEL] [--layers 4] [--vllm-pp 2]

A GPU for each process. MODEL is a directory with a config.json, or a hub id, of a dense model; without it a
small one is made up. Weights are random: a trainer would load its own. Without GPUs bytes travel over Gloo,
and vLLM's build for the CPU serves.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

# What Megatron and vLLM look for while they are imported.
os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import torch.distributed as dist

from reshard import MegatronLayout, read_model

SMALL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 128,
         "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
         "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
         "torch_dtype": "bfloat16"}  # fmt: skip


def shortened(config: dict, layers: int) -> dict:
    """Return a config with so many layers; lists that say something of each layer are cut."""
    per_layer = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == config["num_hidden_layers"]
    }
    return config | per_layer | {"num_hidden_layers": layers}


def main(options: argparse.Namespace, folder: Path) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    from megatron.core.transformer.module import Float16Module
    from vllm import LLM, SamplingParams

    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.megatron.build import build_megatron, initialize_parallel
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    config = dict(read_model(options.model).config) if options.model else SMALL
    (folder / "config.json").write_text(json.dumps(shortened(config, options.layers)), encoding="utf-8")
    size = dist.get_world_size()
    # --8<-- [start:engine]
    with plain_weights():  # vLLM first: it sizes its cache by the memory that is free
        llm = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            enforce_eager=True,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=size // options.vllm_pp,
            seed=0,
            pipeline_parallel_size=options.vllm_pp,
            kv_cache_memory_bytes=1 << (30 if cuda else 27),
        )
    # --8<-- [end:engine]
    layout = MegatronLayout(tp=size)
    initialize_parallel(layout)
    chunks = build_megatron(
        read_model(str(folder)), layout, transformer_impl="transformer_engine" if cuda else "local"
    )
    models = [Float16Module(chunk.config, chunk.cuda() if cuda else chunk) for chunk in chunks]

    # --8<-- [start:connect]
    link = connect(
        RefitGroup.of_process_group(), source=MegatronModel(models), destination=VllmModel.from_llm(llm)
    )
    # --8<-- [end:connect]
    optimizer = torch.optim.SGD(
        [p for model in models for p in model.parameters() if p.requires_grad], lr=0.5
    )
    device = "cuda" if cuda else "cpu"
    tokens, positions = torch.arange(5, 261, device=device)[None], torch.arange(256, device=device)[None]
    mask = torch.ones(256, 256, dtype=torch.bool, device=device).triu(1)[None, None]
    for step in range(options.steps):
        loss = models[0](tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [start:refit]
        # digests on the first step; every N steps in a trainer
        report = link.refit(version=step, verify=step == 0)
        llm.reset_prefix_cache()  # what it remembers was computed from the old weights
        # --8<-- [end:refit]
        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": list(range(5, 25))}], greedy, use_tqdm=False)
        if dist.get_rank() == 0:
            received = sum(report.received_bytes.values())
            print(
                f"step {step}: loss {loss.item():.4f}, version {report.version}, {received / 1e6:.1f} MB "
                f"in {report.transfer_seconds * 1e3:.1f} ms, then "
                f"{output.outputs[0].token_ids}",
                flush=True,
            )
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--vllm-pp", type=int, default=1, help="pipeline stages of vLLM; the rest of the processes are its TP"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts it: torchrun --nproc-per-node 2 examples/refit_colocated.py")
    if int(os.environ["WORLD_SIZE"]) % options.vllm_pp:
        parser.error(f"--vllm-pp {options.vllm_pp} does not divide the {os.environ['WORLD_SIZE']} processes")
    from reshard.megatron.build import without_gpu

    with tempfile.TemporaryDirectory() as made, without_gpu():
        main(options, Path(made))
    os._exit(0)  # vLLM's shut-down would wait for processes that have no more to say
