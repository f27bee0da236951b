"""Trainer and vLLM in the same processes: after each training step vLLM serves the new weights.

    torchrun --nproc-per-node 2 examples/refit_colocated.py [--model llama-3.1-8b] [--layers 4]

A GPU for each process; weights are random, at the published shapes. Without GPUs a small model is trained, bytes travel over
Gloo, and vLLM's build for the CPU serves.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.models import config_of, device, finish, megatron_models, start_processes, vllm_engine


def train(models: list[torch.nn.Module], llm, steps: int) -> None:
    """The loop of a trainer: connect once, refit after each step."""
    from vllm import SamplingParams

    from reshard.live.megatron import MegatronModel
    from reshard.live.vllm import VllmModel
    from reshard.refit import Members, connect

    link = connect(Members.of_process_group(), source=MegatronModel(models), destination=VllmModel.from_llm(llm))
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.5)
    tokens, positions = torch.arange(5, 261)[None].to(device()), torch.arange(256)[None].to(device())
    mask = torch.ones(256, 256, dtype=torch.bool, device=device()).triu(1)[None, None]
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    for step in range(steps):
        loss = models[0](tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = link.refit(version=step, verify=step == 0)  # digests on the first step; every N steps in a trainer
        llm.reset_prefix_cache()  # what it remembers was computed from the old weights
        [output] = llm.generate([{"prompt_token_ids": list(range(5, 25))}], greedy, use_tqdm=False)
        if dist.get_rank() == 0:
            received = report.local_bytes + report.peer_bytes + report.bucket_bytes
            print(f"step {step}: loss {loss.item():.4f}, version {report.version}, {received / 1e6:.1f} MB in "
                  f"{report.transfer_seconds * 1e3:.1f} ms, then {output.outputs[0].token_ids}", flush=True)  # fmt: skip


def main() -> None:
    from reshard import Layout
    from reshard.live.build import without_gpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "llama-3.1-8b" if device() == "cuda" else "tiny-qwen3"
    parser.add_argument("--model", default=default, help="a dense model of benchmarks/models.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--vllm-pp", type=int, default=1, help="pipeline stages of vLLM; the rest of the processes are its TP")
    options = parser.parse_args()
    start_processes()
    config, size = config_of(options.model, options.layers), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder, without_gpu():
        # vLLM first: it sizes its cache by the memory that is free.
        engine = {"tensor_parallel_size": size // options.vllm_pp, "pipeline_parallel_size": options.vllm_pp}
        llm = vllm_engine(Path(folder), config, **engine)
        train(megatron_models(config, Layout(tp=size)), llm, options.steps)
    finish()


if __name__ == "__main__":
    main()
