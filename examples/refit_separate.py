"""A trainer and a vLLM in processes of their own: on the same GPUs, with sleep mode, or on different ones.

    torchrun --nproc-per-node 2 examples/refit_separate.py                     engine on the trainer's GPUs
    torchrun --nproc-per-node 2 examples/refit_separate.py --engine-gpus 2,3   engine on two others

Rank 0 starts the engine. A trainer with its own scheduler (Ray, say) does the same with its own calls. Without GPUs a small model is used,
bytes travel over Gloo, vLLM's build for the CPU serves, and does not sleep.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.models import config_of, device, finish, megatron_models, start_processes

ADDRESS = "127.0.0.1:29617"


def engine(pipe, gpus: str, folder: str, options: dict) -> None:
    """A process that owns a vLLM and does what it is told: (method, arguments) in, result out."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in launcher]:
        del os.environ[name]
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpus, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    from vllm import LLM

    llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, enforce_eager=True,
              worker_extension_cls="reshard.vllm_worker.RefitExtension", **options)  # fmt: skip
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        method, args, keywords = call
        try:
            pipe.send(getattr(llm, method)(*args, **keywords))
        except Exception as error:
            pipe.send(error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-30b-a3b" if device() == "cuda" else "tiny-qwen3-moe")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--engine-gpus", help="default: the trainer's")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    from reshard import Layout
    from reshard.live.megatron import MegatronModel
    from reshard.refit import Members, connect

    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = options.engine_gpus or ",".join(str(i) for i in range(trainers))
    tp, sleeps = len(gpus.split(",")), options.engine_gpus is None and device() == "cuda"
    config = config_of(options.model, options.layers)
    start_processes()

    def tell(method: str, *args, **keywords):
        """Ask the engine for something; the answer is read by `answer`."""
        if rank == 0:
            pipe.send((method, args, keywords))

    def answer():
        if rank == 0:
            result = pipe.recv()
            if isinstance(result, Exception):
                raise result
            return result

    if rank == 0:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        pipe, theirs = multiprocessing.Pipe()
        memory = {"gpu_memory_utilization": 0.3} if device() == "cuda" else {"kv_cache_memory_bytes": 1 << 27}
        settings = memory | {"tensor_parallel_size": tp, "enable_sleep_mode": sleeps}
        process = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs, gpus, str(folder), settings))
        process.start()
        print("engine", answer(), flush=True)
    dist.barrier()
    moe = "num_experts" in config or "n_routed_experts" in config
    models = megatron_models(config, Layout(tp=trainers, ep=trainers if moe else 1, etp=1 if moe else None))

    # The part that goes into a trainer: connect once ...
    tell("collective_rpc", "reshard_connect", args=(ADDRESS, trainers, trainers + tp))
    link = connect(Members.join(ADDRESS, rank, trainers + tp), MegatronModel(models))
    answer()
    prompts = [{"prompt_token_ids": list(range(5, 25))}]
    for step in range(options.steps):
        if sleeps:
            tell("sleep", level=2)
            answer()
        for model in models:  # an optimizer step
            for index, parameter in enumerate(model.parameters()):
                torch.manual_seed(1000 * step + index)
                parameter.data.normal_(0, 0.02)
        if sleeps:
            tell("wake_up", tags=["weights"])
            answer()
        # ... and after each step: the engine pulls the weights while the trainer waits.
        tell("collective_rpc", "reshard_refit", args=(step, True))
        report = link.refit(step, verify=True)
        received = answer()
        if sleeps:
            tell("wake_up", tags=["kv_cache"])
            answer()
        tell("reset_prefix_cache")
        answer()
        if rank == 0:
            from vllm import SamplingParams

            tell("generate", prompts, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
            tokens = answer()[0].outputs[0].token_ids
            moved = [entry["peer_bytes"] + entry["bucket_bytes"] + entry["local_bytes"] for entry in received]
            print(f"step {step}: version {report.version}, {sum(moved) / 1e6:.1f} MB in "
                  f"{max(entry['transfer_seconds'] for entry in received) * 1e3:.1f} ms, then {tokens}", flush=True)  # fmt: skip
    if rank == 0:
        pipe.send(None)
        process.join(30)
        process.kill()
    finish()


if __name__ == "__main__":
    main()
