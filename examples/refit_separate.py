"""A trainer and a vLLM in processes of their own: on the same GPUs, with sleep mode, or on different ones.

    torchrun --nproc-per-node 2 examples/refit_separate.py [MODEL]                     engine on the trainer's GPUs
    torchrun --nproc-per-node 2 examples/refit_separate.py [MODEL] --engine-gpus 2,3   engine on two others

MODEL is a directory with a config.json, or a hub id; without it a small one with experts is made up. Rank 0
starts the engine. A trainer with its own scheduler (Ray, say) does the same with its own calls. Without GPUs
bytes travel over Gloo, vLLM's build for the CPU serves, and does not sleep.
"""

import argparse
import atexit
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from reshard import MegatronLayout, read_model

SMALL = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 128,
         "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
         "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
         "hidden_act": "silu", "torch_dtype": "bfloat16"}  # fmt: skip


def shortened(config: dict, layers: int) -> dict:
    """Return a config with so many layers; lists that say something of each layer are cut."""
    per_layer = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == config["num_hidden_layers"]
    }
    return config | per_layer | {"num_hidden_layers": layers}


def engine(pipe, gpus: str, folder: str, options: dict) -> None:
    """A process that owns a vLLM and does what it is told: (method, arguments) in, result out."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in launcher]:
        del os.environ[name]
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": gpus,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM

    # --8<-- [start:engine]
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        worker_extension_cls="reshard.engines.vllm.worker.RefitExtension",
        **options,
    )
    # --8<-- [end:engine]
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        method, args, keywords = call
        try:
            pipe.send(getattr(llm, method)(*args, **keywords))
        except Exception as error:
            pipe.send(error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--engine-gpus", help="default: the trainer's")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--address", default="127.0.0.1:29617", help="where members meet; any free port")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts it: torchrun --nproc-per-node 2 examples/refit_separate.py")

    # What Megatron and vLLM look for while they are imported.
    cuda = torch.cuda.is_available()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not cuda:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    from megatron.core.transformer.module import Float16Module

    from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = options.engine_gpus or ",".join(str(i) for i in range(trainers))
    tp, sleeps = len(gpus.split(",")), options.engine_gpus is None and cuda
    config = dict(read_model(options.model).config) if options.model else SMALL
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

    def ended() -> NoReturn:
        process.join()
        sys.exit(f"the engine's process ended with exit code {process.exitcode}")

    def gone() -> str:
        """Why nobody has to wait for the engine any more; only rank 0 knows."""
        code = process.exitcode if rank == 0 else None
        return "" if code is None else f"the engine's process ended with exit code {code}"

    def tell(method: str, *args, **keywords):
        """Ask the engine for something; the answer is read by `answer`."""
        if rank == 0:
            try:
                pipe.send((method, args, keywords))
            except BrokenPipeError:
                ended()

    def answer():
        if rank == 0:
            try:
                result = pipe.recv()
            except (EOFError, ConnectionResetError):
                ended()
            if isinstance(result, Exception):
                raise result
            return result

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shortened(config, options.layers)), encoding="utf-8")
    if rank == 0:
        pipe, theirs = multiprocessing.Pipe()
        memory = {"gpu_memory_utilization": 0.3} if cuda else {"kv_cache_memory_bytes": 1 << 27}
        settings = memory | {"tensor_parallel_size": tp, "enable_sleep_mode": sleeps}
        process = multiprocessing.get_context("spawn").Process(
            target=engine, args=(theirs, gpus, str(folder), settings)
        )
        process.start()
        atexit.register(process.kill)  # else an error here would wait for an engine that goes on
        theirs.close()  # with a copy here the pipe would stay open when the engine's process ends
        print("engine", answer(), flush=True)
    dist.barrier()
    model = read_model(str(folder))
    layout = (
        MegatronLayout(tp=trainers, ep=trainers, etp=1) if model.num_experts else MegatronLayout(tp=trainers)
    )
    with without_gpu():
        initialize_parallel(layout)
        chunks = build_megatron(model, layout, transformer_impl="transformer_engine" if cuda else "local")
    models = [Float16Module(chunk.config, chunk.cuda() if cuda else chunk) for chunk in chunks]

    # --8<-- [start:connect]
    # The part that goes into a trainer: connect once ...
    tell("collective_rpc", "reshard_connect", args=(options.address, trainers, trainers + tp))
    members = RefitGroup.join(options.address, rank, trainers + tp)
    with members.watching(gone):
        link = connect(members, MegatronModel(models))
    answer()
    # --8<-- [end:connect]
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
        # --8<-- [start:refit]
        # ... and after each step: the engine pulls the weights while the trainer waits.
        tell("collective_rpc", "reshard_refit", args=(step, True))
        with members.watching(gone):
            report = link.refit(step, verify=True)
        received = answer()
        # --8<-- [end:refit]
        if sleeps:
            tell("wake_up", tags=["kv_cache"])
            answer()
        tell("reset_prefix_cache")
        answer()
        if rank == 0:
            from vllm import SamplingParams

            tell(
                "generate",
                prompts,
                SamplingParams(temperature=0, max_tokens=8, detokenize=False),
                use_tqdm=False,
            )
            tokens = answer()[0].outputs[0].token_ids
            moved = sum(entry["received_bytes"] for entry in received)
            print(
                f"step {step}: version {report.version}, {moved / 1e6:.1f} MB in "
                f"{max(entry['transfer_seconds'] for entry in received) * 1e3:.1f} ms, then "
                f"{tokens}",
                flush=True,
            )
    if rank == 0:
        pipe.send(None)
        process.join(30)
        process.kill()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
