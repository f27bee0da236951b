"""A trainer that offloads between refits: is its memory really free, does the next refit find the weights,
what does it cost?

    torchrun --nproc-per-node 1 -m benchmarks.refits.offload --model qwen3-30b-a3b --layers 8
        [--wrap ddp] [--engine-gpus 1] [--json FILE]

The trainer (Megatron, Transformer Engine layers) runs in torchrun's processes, a vLLM with sleep mode in
processes of its own, on the same GPUs or on `--engine-gpus`. As verl (`--wrap ddp`: the storages of DDP's
buffers are resized to nothing) or ROLL (`--wrap bare`: each parameter's data moves to the host) do, the
trainer offloads after a refit, empties torch's cache, and reloads to the same addresses, and to others.
Checked: the driver has the memory back (`mem_get_info`); every refit after a reload, without `verify`, leaves
the bits in vLLM that a verified refit of the same weights left; an engine that sleeps is refused, and one
that has lost its weights does not serve. Measured: a refit with mappings released after each, and kept. With
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` in the environment the trainer's memory cannot be mapped,
and is staged. Two runs that differ in nothing but `--backend` must print the same ``bits``.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.models import config_of, megatron_models
from benchmarks.processes import finish, start_processes


class Fingerprints:
    """Mixed into vLLM's workers beside the refits: what they hold."""

    def fingerprints(self) -> dict[str, int]:
        from benchmarks.refits.refit import fingerprints

        return fingerprints(self.get_model())


def engine(pipe, gpus: str, folder: str, options: dict) -> None:
    """A process that owns a vLLM, made at the first message, and does what it is told: (method, arguments) in,
    result out."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in launcher]:
        del os.environ[name]
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpus, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    from vllm import LLM

    if not pipe.recv():  # nothing is allocated before the trainer has room for it
        return
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 512,
                "enforce_eager": True, "enable_sleep_mode": True,
                "worker_extension_cls": "benchmarks.refits.offload.Extension"}  # fmt: skip
    llm = LLM(model=folder, **(defaults | options))
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        method, args, keywords = call
        try:
            pipe.send(getattr(llm, method)(*args, **keywords))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def start_engine(config: dict, gpus: str, options: dict, at_once: bool = True) -> tuple:
    """A process with a vLLM on these GPUs, and the pipe to it, which says "ready" first; unless `at_once`, the
    vLLM is made when the pipe is sent True."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:  # `gpus` count these
        gpus = ",".join(visible.split(",")[int(gpu)] for gpu in gpus.split(","))
    pipe, theirs = multiprocessing.Pipe()
    allocator = os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # sleep mode refuses expandable segments
    process = multiprocessing.get_context("spawn").Process(
        target=engine, args=(theirs, gpus, str(folder), options)
    )
    process.start()
    if allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    if at_once:
        pipe.send(True)
    return process, pipe


def __getattr__(name: str):
    # vLLM is imported only where an engine asks for its extension.
    if name == "Extension":
        from reshard.engines.vllm.worker import RefitExtension

        return type("Extension", (RefitExtension, Fingerprints), {})
    raise AttributeError(name)


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Megatron's DDP with its parameters in the distributed optimizer's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=None, grad_reduce_in_fp32=False
    )
    return DistributedDataParallel(model.config, options, model)


class Trainer:
    """The models, and what a trainer does with them between refits."""

    def __init__(self, models: list, wrap: str) -> None:
        self.models = [ddp(model) for model in models] if wrap == "ddp" else models
        self.buffers = (
            [b for m in self.models for b in (*m.buffers, *m.expert_parallel_buffers)]
            if wrap == "ddp"
            else []
        )
        self.aside: list = []

    def parameters(self) -> list[torch.Tensor]:
        return [p for model in self.models for p in model.parameters()]

    def step(self, seed: int) -> None:
        """Other weights, the same for the same seed."""
        for index, parameter in enumerate(self.parameters()):
            torch.manual_seed(100_000 * seed + index)
            parameter.data.normal_(0, 0.02)

    def offload(self) -> None:
        """Parameters to the host, and their memory back to the driver."""
        if self.buffers:
            for buffer in self.buffers:
                self.aside.append(buffer.param_data.cpu())
                buffer.param_data.storage().resize_(0)
                buffer.grad_data.storage().resize_(0)
        else:
            for parameter in self.parameters():
                parameter.data = parameter.data.cpu()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """And back."""
        for buffer, data in zip(self.buffers, self.aside, strict=True):
            buffer.param_data.storage().resize_(data.numel())
            buffer.param_data.copy_(data)
        self.aside = []
        if not self.buffers:
            for parameter in self.parameters():
                parameter.data = parameter.data.cuda()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--wrap", choices=["bare", "ddp"], default="bare")
    parser.add_argument("--engine-gpus", help="default: the trainer's")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.35)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quantization", help="what vLLM serves in: fp8_per_block")
    parser.add_argument("--port", type=int, default=29631)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from reshard import MegatronLayout, ReshardError
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = options.engine_gpus or ",".join(str(i) for i in range(trainers))
    tp = len(gpus.split(","))
    config = config_of(options.model, options.layers)
    moe = "num_experts" in config or "n_routed_experts" in config
    found: dict = {
        "model": options.model,
        "layers": config["num_hidden_layers"],
        "wrap": options.wrap,
        "engine_gpus": gpus,
        "trainers": trainers,
        "backend": options.backend,
        "quantization": options.quantization,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }

    def tell(method: str, *args, **keywords) -> None:
        if rank == 0:
            pipe.send((method, args, keywords))

    def answer(expect_error: bool = False):
        if rank:
            return None
        result = pipe.recv()
        if isinstance(result, Exception) and not expect_error:
            raise result
        return result

    if rank == 0:
        settings = {"tensor_parallel_size": tp, "gpu_memory_utilization": options.gpu_memory_utilization}
        settings |= {"quantization": options.quantization} if options.quantization else {}
        process, pipe = start_engine(config, gpus, settings)
        print("engine", answer(), flush=True)
    start_processes()
    dist.barrier()
    trainer = Trainer(
        megatron_models(
            config, MegatronLayout(tp=trainers, ep=trainers if moe else 1, etp=1 if moe else None)
        ),
        options.wrap,
    )
    weights = sum(p.numel() * p.element_size() for p in trainer.parameters())
    found["weight_bytes"] = weights

    def linked(port: int, release: bool):
        trainer.step(0)
        tell("collective_rpc", "reshard_connect", args=(f"127.0.0.1:{port}", trainers, trainers + tp))
        link = connect(
            RefitGroup.join(f"127.0.0.1:{port}", rank, trainers + tp),
            MegatronModel(trainer.models),
            backend=options.backend,
            keep_mapped=not release,
        )
        answer()
        return link

    def refit(link, verify: bool = False):
        tell("collective_rpc", "reshard_refit", args=(None, verify))
        report = link.refit(verify=verify)
        return report, answer()

    def held():
        tell("collective_rpc", "fingerprints")
        return answer()

    def free() -> int:
        dist.barrier()
        return torch.cuda.mem_get_info()[0]

    def check(name: str, good: bool, what="") -> None:
        if rank == 0:
            print(f"{'ok  ' if good else 'FAIL'} {name} {what}", flush=True)
            found.setdefault("checks", {})[name] = bool(good)

    for release in (True, False):
        how = "released" if release else "kept"
        link = linked(options.port + release, release)
        known = {}
        for seed in (1, 2):
            trainer.step(seed)
            _, reports = refit(link, verify=True)
            known[seed] = held()
        check(f"{how}: two sets of weights differ", rank or known[1] != known[2])
        if rank == 0:
            # The same for every backend: the weights come from seeds.
            found[f"{how}_bits"] = zlib.crc32(
                json.dumps([sorted(held_by_one.items()) for held_by_one in known[2]]).encode()
            )
            found[f"{how}_routes"] = {
                route: sum(report[f"received_bytes_{route}"] for report in reports)
                for route in ("cuda_ipc", "staged", "nccl")
            }
            print(how, found[f"{how}_routes"], "bits", found[f"{how}_bits"], flush=True)
        for place in ("the same addresses", "other addresses"):
            before = free()
            at = trainer.parameters()[0].data_ptr()
            trainer.offload()
            freed = free() - before
            found[f"{how}_freed_bytes, {place}"] = freed
            blockers: list = []
            if place == "other addresses":
                blockers = [
                    torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(weights >> 28)
                ]
            trainer.reload()
            moved = trainer.parameters()[0].data_ptr() != at
            trainer.step(1)
            refit(link)
            check(
                f"{how}: right after a reload to {place}",
                rank or held() == known[1],
                f"(freed {freed / 1e9:.2f} of {weights / 1e9:.2f} GB, moved: {moved})",
            )
            del blockers
            torch.cuda.empty_cache()
            trainer.step(2)
            refit(link)
            check(f"{how}: and after another step", rank or held() == known[2])
        timed = [refit(link) for _ in range(options.rounds + 2)][2:]
        if rank == 0:
            for key in ("wait_seconds", "transfer_seconds", "total_seconds"):
                found[f"{how}_{key}"] = statistics.median(
                    max(report[key] for report in engines) for _, engines in timed
                )
            print(
                how,
                {
                    k: round(v * 1e3, 2)
                    for k, v in found.items()
                    if k.startswith(how) and k.endswith("seconds")
                },
                "ms",
                flush=True,
            )
        if release:
            # An engine that sleeps is refused, and goes on where it was; one that lost its weights does not
            # serve before a refit.
            tell("sleep", level=2)
            answer()
            tell("collective_rpc", "reshard_refit", args=(None, False))
            try:
                link.refit()
                said = "no error"
            except ReshardError as error:
                said = str(error)
            answer(expect_error=True)
            check("a sleeping engine is refused", "this vLLM sleeps" in said, said)
            tell("wake_up", tags=["weights"])
            answer()
            trainer.step(1)
            refit(link)
            tell("wake_up", tags=["kv_cache"])
            answer()
            check("a woken engine is refitted", rank or held() == known[1])
        dist.barrier()
        link.close()
    if rank == 0:
        pipe.send(None)
        process.join(30)
        process.kill()
        print(json.dumps(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found) + "\n")
    finish()


if __name__ == "__main__":
    main()
