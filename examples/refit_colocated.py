"""Trainer and vLLM in the same processes: after each training step vLLM serves the new weights.

    torchrun --nproc-per-node 2 examples/refit_colocated.py [--model llama-3.1-8b] [--layers 4]

A GPU for each process; weights are random, at the published shapes.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist


def train(models: list[torch.nn.Module], llm, steps: int) -> None:
    """The loop of a trainer: connect once, refit after each step."""
    from vllm import SamplingParams

    from reshard.live.megatron import MegatronModel
    from reshard.live.vllm import VllmModel
    from reshard.refit import Members, connect

    link = connect(Members.of_process_group(), source=MegatronModel(models), destination=VllmModel.from_llm(llm))
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.5)
    tokens = torch.arange(5, 261, device="cuda")[None]
    positions, mask = torch.arange(256, device="cuda")[None], torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)[None, None]
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
            print(f"step {step}: loss {loss.item():.4f}, version {report.version}, {received / 1e9:.2f} GB in "
                  f"{report.transfer_seconds * 1e3:.1f} ms, then {output.outputs[0].token_ids}", flush=True)  # fmt: skip


def main() -> None:
    from benchmarks.gpu_models import config_of, megatron_models, vllm_engine
    from reshard import Layout

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a dense model of benchmarks/gpu_models.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    config, tp = config_of(options.model, options.layers), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        # vLLM first: it sizes its cache by the memory that is free.
        llm = vllm_engine(Path(folder), config, tensor_parallel_size=tp)
        train(megatron_models(config, Layout(tp=tp)), llm, options.steps)
    os._exit(0)


if __name__ == "__main__":
    main()
