"""The GPU memory of real training steps, compared with `reshard.memory`'s estimate of the same case.

    python -m benchmarks.memory.peaks                       one GPU with Megatron-Core and Transformer Engine
    python -m benchmarks.memory.peaks --gpus 2              two: TP, PP, EP and CP of 2
    python -m benchmarks.memory.peaks --toy                 no GPU: small models, local layers; shows that the steps run

Megatron's own modules at full width with few layers and a smaller vocabulary, its schedules, its distributed
optimizer: forward, backward, a step of the optimizer, twice. Experts are as many as one rank of an expert
parallel run has, with forced balance, so that the rank has the tokens and the weights of such a run. Each
group of cases is a process of its own; a case that fails prints its error, and the next one goes on. A case
that the estimate says cannot fit is left out, and said to be. `--seconds` bounds all of it.

Beside the estimate stands what Megatron-LM's ``report_theoretical_memory`` says, where it is installed.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from benchmarks.models import MODELS

GIB = 1 << 30
QWEN_235B = MODELS["qwen3-30b-a3b"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
}
# Published widths; layers, vocabulary and experts of a rank as they fit.
WIDTHS = {
    "llama-70b": MODELS["llama-3.1-70b"]
    | {"num_hidden_layers": 2, "vocab_size": 32768, "max_position_embeddings": 32768},
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"]
    | {"num_hidden_layers": 6, "num_experts": 16, "max_position_embeddings": 32768},
    "qwen3-235b-a22b": QWEN_235B
    | {"num_hidden_layers": 3, "num_experts": 16, "vocab_size": 32768, "max_position_embeddings": 32768},
    "deepseek-v3": MODELS["deepseek-v3"]
    | {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "vocab_size": 16384,
        "max_position_embeddings": 32768,
    },
}
TOYS = {
    "toy-qwen3": MODELS["tiny-qwen3"] | {"max_position_embeddings": 256},
    "toy-qwen3-moe": MODELS["tiny-qwen3-moe"] | {"max_position_embeddings": 256},
}
DENSE = ("none", "mlp", "full", "block:1")
EXPERTS = ("none", "moe_act", "layernorm", "moe_act,layernorm", "moe", "full")
LATENT = (
    "none",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "moe_act,layernorm,mla_up_proj,mlp",
    "shared_experts",
    "moe",
    "full",
)


@dataclass
class Case:
    model: str
    layout: dict = field(default_factory=dict)
    cp: int = 1
    seq_length: int = 4096
    recompute: str = "none"
    microbatches: int = 1
    fp8: str | None = None  # Transformer Engine's recipe

    def __str__(self) -> str:
        sizes = " ".join(f"{name}{n}" for name, n in (self.layout | {"cp": self.cp}).items() if n != 1)
        fp8 = f" fp8 {self.fp8}" if self.fp8 else ""
        return f"{self.model} {sizes or 'tp1'} s{self.seq_length} m{self.microbatches} {self.recompute}{fp8}"


def cases(gpus: int, toy: bool) -> list[list[Case]]:
    """Groups of cases; each has a model and a layout."""
    names, lengths = (TOYS, (64,)) if toy else (WIDTHS, (4096, 32768))
    if gpus == 1:
        layouts = [({}, 1, 1)]
    else:
        layouts = [({"tp": 2, "etp": 1}, 1, 1), ({"pp": 2}, 1, 4), ({"ep": 2}, 1, 1), ({}, 2, 1)]
    found = []
    for layout, cp, microbatches in layouts:
        for name in names:
            moe = "moe" in name or "a3b" in name or "a22b" in name or "deepseek" in name
            if ("ep" in layout and not moe) or (toy and cp > 1) or (toy and moe and "tp" in layout):
                continue
            choices = LATENT if "deepseek" in name else EXPERTS if moe else DENSE
            if gpus > 1 or toy:
                choices = ("none", "full")
            sizes = {key: n for key, n in layout.items() if key != "etp" or moe}
            found.append(
                [
                    Case(name, sizes, cp, length, choice, microbatches)
                    for length in lengths
                    for choice in choices
                ]
            )
    return found


def estimate(
    case: Case, gpus: int, fusion: bool, gpu_bytes: int | None, impl: str, config: dict | None = None
):
    """`reshard.memory`'s report of a case."""
    import reshard
    from reshard.models.model import Model

    model = Model.from_hf(config or (WIDTHS | TOYS)[case.model], case.model)
    layout = reshard.MegatronLayout(**case.layout)
    return (
        model,
        layout,
        reshard.estimate_memory(
            model,
            layout,
            gpus=gpus,
            cp=case.cp,
            seq_length=case.seq_length,
            recompute=case.recompute,
            imbalance=1.0,
            num_microbatches=case.microbatches,
            gradient_accumulation_fusion=fusion,
            gpu_memory=gpu_bytes,
            transformer_impl=impl,
            fp8=case.fp8,
        ),
    )


def estimated(stage) -> dict:
    """What a row says of a stage of that report."""
    return {
        "estimate": stage.allocated,
        "estimate_static": stage.static,
        "band": list(stage.allocated_band),
        "outside_band": list(stage.outside),
    }


def recompute_fields(text: str) -> dict:
    """`--recompute` as fields of Megatron's config."""
    from reshard.memory.options import Recompute

    r = Recompute.of(text)
    if r.full:
        return {
            "recompute_granularity": "full",
            "recompute_method": r.method,
            "recompute_num_layers": r.layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": sorted(r.modules)} if r.modules else {}


def theoretical(model, layout, case: Case, gpus: int) -> float | None:
    """GiB by Megatron-LM's own formula, for its fullest stage; None if it has none."""
    try:
        from megatron.training.theoretical_memory_usage import report_theoretical_memory
    except ImportError:
        return None
    fields = recompute_fields(case.recompute)
    tp, pp, ep = layout.tp, layout.pp, layout.ep
    from reshard.megatron.arguments import megatron_args

    of_model = megatron_args(model)
    values = {
        "moe_shared_expert_intermediate_size": None,
        "num_experts": None,
        "moe_layer_freq": 1,
        "mtp_num_layers": None,
        "moe_latent_size": None,
        "moe_ffn_hidden_size": 0,
        "kv_channels": None,
        "q_lora_rank": None,
        "hybrid_layer_pattern": None,
        "hybrid_override_pattern": None,
        "is_hybrid_model": False,
        "num_query_groups": None,
        "recompute_granularity": None,
    }
    values |= of_model | fields
    values |= {
        "seq_length": case.seq_length,
        "micro_batch_size": 1,
        "padded_vocab_size": model.symbols["V"],
        "sequence_parallel": tp > 1,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": case.cp,
        "data_parallel_size": gpus // (tp * pp * case.cp),
        "world_size": gpus,
        "use_distributed_optimizer": True,
    }
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = report_theoretical_memory(SimpleNamespace(**values), num_microbatches=case.microbatches)
        return found[2] / 1024
    except Exception as error:
        print(f"  report_theoretical_memory: {type(error).__name__}: {str(error)[:120]}")
        return None


def train(model, layout, case: Case, toy: bool) -> dict:
    """Two training steps; what torch had allocated at most, in bytes, on this rank."""
    import torch
    from megatron.core import parallel_state as mpu

    from benchmarks.memory.training import Training, fused

    options = {
        "sequence_parallel": layout.tp > 1 and not toy,
        "context_parallel_size": case.cp,
        **recompute_fields(case.recompute),
        **fused(model),
    }
    if model.num_experts:
        options |= {"moe_router_force_load_balancing": True}
    if case.fp8:
        options |= {"fp8": "hybrid" if case.fp8 == "delayed" else "e4m3", "fp8_recipe": case.fp8}
        options |= {"moe_router_padding_for_quantization": True} if model.num_experts else {}
    left = 0 if toy else torch.cuda.memory_allocated()
    training = Training(model, layout, **options)
    static = 0 if toy else torch.cuda.memory_allocated() - left
    seconds, in_passes, in_step = 0.0, 0, 0
    for _ in range(1 if toy else 2):
        if not toy:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        training.passes(case.seq_length, case.microbatches, case.cp)
        if training.optimizer is not None:
            in_passes = max(in_passes, torch.cuda.max_memory_allocated() - left)
            torch.cuda.reset_peak_memory_stats()
            training.optimizer.step()
            in_step = max(in_step, torch.cuda.max_memory_allocated() - left)
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    result = {"rank": torch.distributed.get_rank(), "stage": mpu.get_pipeline_model_parallel_rank(), "seconds": seconds,
              "grads": training.has_gradients()}  # fmt: skip
    if not toy:
        free, total = torch.cuda.mem_get_info()
        result |= {
            "peak": max(in_passes, in_step), "in_passes": in_passes, "in_step": in_step, "left": left,
            "held": torch.cuda.memory_allocated() - left, "reserved": torch.cuda.max_memory_reserved(),
            "built": static, "outside": total - free - torch.cuda.memory_reserved(),
        }  # fmt: skip
        training.free()
    return result


def worker(path: str) -> None:
    """One rank of a group of cases."""
    import torch

    from benchmarks.memory.training import fusion_is_there, on_cpu

    asked = json.loads(Path(path).read_text(encoding="utf-8"))
    toy, gpus, group = asked["toy"], asked["gpus"], [Case(**each) for each in asked["cases"]]
    rank = int(os.environ["RANK"])
    if not toy:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo" if toy else "nccl")
    from reshard.megatron.build import initialize_parallel, without_gpu

    total = None if toy else torch.cuda.get_device_properties(0).total_memory
    fusion = fusion_is_there()
    if rank == 0 and not asked["quiet"]:
        import megatron.core

        engine = "none" if toy else __import__("transformer_engine").__version__
        card = "CPU" if toy else f"{torch.cuda.get_device_name()}, {total / GIB:.1f} GiB"
        print(
            f"{card}; torch {torch.__version__}, megatron-core {megatron.core.__version__}, Transformer "
            f"Engine {engine}; gradient accumulation fusion {fusion}",
            flush=True,
        )
    with without_gpu(), on_cpu():
        model, layout, _ = estimate(group[0], gpus, fusion, None, "local" if toy else "transformer_engine")
        initialize_parallel(layout, context_parallel_size=group[0].cp)
        for case in group:
            late = time.time() > asked["deadline"]
            flag = torch.tensor([int(late)], device="cpu" if toy else "cuda")
            torch.distributed.all_reduce(flag)
            if int(flag):
                if rank == 0:
                    print(f"{case}: no time left", flush=True)
                continue
            run(case, model, layout, gpus, toy, fusion, total, rank, Path(path).parent)
    torch.distributed.destroy_process_group()


def run(case, model, layout, gpus, toy, fusion, total, rank, folder) -> None:
    """One case on this rank, printed by the first."""
    import torch

    _, _, report = estimate(case, gpus, fusion, total, "local" if toy else "transformer_engine")
    most = max(stage.allocated for stage in report.stages)
    if total is not None and most * 1.02 > total - 4 * GIB:
        if rank == 0:
            print(f"{case}: left out, the estimate is {most / GIB:.1f} GiB", flush=True)
        return
    try:
        mine = train(model, layout, case, toy)
    except Exception as error:
        traceback.print_exc(limit=-4)
        mine = {"rank": rank, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    gc.collect()
    if not toy:
        torch.cuda.empty_cache()
    everyone: list = [None] * gpus
    torch.distributed.all_gather_object(everyone, mine)
    if rank:
        return
    formula = theoretical(model, layout, case, gpus)
    for one in everyone:
        row = asdict(case) | one | {"gpus": gpus, "theoretical_gib": formula, "fusion": fusion}
        if "error" in one:
            print(f"{case} rank {one['rank']}: {one['error']}", flush=True)
        else:
            stage = report.stages[one["stage"]]
            row |= estimated(stage)
            said = "no Megatron formula" if formula is None else f"report_theoretical_memory {formula:.2f}"
            if toy:
                print(f"{case} rank {one['rank']}: ran, {one['seconds']:.1f} s, gradients {one['grads']}; estimate "
                      f"{stage.allocated / GIB:.4f} GiB; {said}", flush=True)  # fmt: skip
            else:
                off = stage.allocated - one["peak"]
                good = "ok" if abs(off) <= max(2 * GIB, 0.03 * one["peak"]) else "OFF"
                phases = ", ".join(
                    f"{name} {one[key] / GIB:.2f}"
                    for name, key in (("passes", "in_passes"), ("step", "in_step"), ("held", "held"))
                )
                expected = f"estimate {stage.allocated / GIB:.2f} ({off / GIB:+.2f}) {good}"
                built = f"built {one['built'] / GIB:.2f}, static {stage.static / GIB:.2f}"
                reserved = f"reserved {one['reserved'] / GIB:.2f}, outside {one['outside'] / GIB:.2f}"
                print(
                    f"{case} rank {one['rank']}: peak {one['peak'] / GIB:.2f} ({phases}), {expected}; "
                    f"{built}; {reserved}; {said}",
                    flush=True,
                )
        with open(folder / "rows.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--models", help="some of them, such as deepseek-v3,llama-70b")
    parser.add_argument("--lengths", help="some of 4096,32768")
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--json", help="write the rows here, one a line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    deadline, rows = time.time() + args.seconds, []
    for index, group in enumerate(cases(args.gpus, args.toy)):
        chosen = [
            case
            for case in group
            if (not args.models or case.model in args.models.split(","))
            and (not args.lengths or str(case.seq_length) in args.lengths.split(","))
        ]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cases.json"
            path.write_text(
                json.dumps({"toy": args.toy, "gpus": args.gpus, "deadline": deadline, "quiet": index > 0,
                            "cases": [asdict(case) for case in chosen]}),
                encoding="utf-8",
            )  # fmt: skip
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                       str(args.gpus), "-m", "benchmarks.memory.peaks", "--worker", str(path)]  # fmt: skip
            environment = os.environ | {
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            try:
                done = subprocess.run(
                    command, env=environment, timeout=max(30, deadline - time.time() + 60), check=False
                )
                if done.returncode:
                    print(
                        f"{chosen[0].model} {chosen[0].layout}: the processes ended with {done.returncode}",
                        flush=True,
                    )
            except subprocess.TimeoutExpired:
                print(f"{chosen[0].model} {chosen[0].layout}: did not end in time", flush=True)
            found = Path(folder) / "rows.jsonl"
            rows += found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    if args.json:
        Path(args.json).write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    measured = [json.loads(row) for row in rows]
    good = [row for row in measured if "peak" in row]
    if good:
        off = [(row["estimate"] - row["peak"]) / GIB for row in good]
        print(f"{len(good)} peaks: estimates are {min(off):+.2f} to {max(off):+.2f} GiB off")
    if failed := sum("error" in row for row in measured):
        print(f"{failed} failed")


if __name__ == "__main__":
    main()
