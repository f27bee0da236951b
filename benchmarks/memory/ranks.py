"""The GPU memory of one rank of a large training run, compared with `reshard.memory`'s estimate, on one GPU.

    python -m benchmarks.memory.ranks                  one GPU with Megatron-Core and Transformer Engine
    python -m benchmarks.memory.ranks --toy            no GPU: small models, local layers; shows that the ranks run

Whole published models at layouts of 8 to 1,024 GPUs. The process is one rank of torch's fake
process group, whose collectives return at once and move nothing: a gather finds this rank's own
part in every place. Megatron sees a run of that size: its parallel state, pipeline schedule with
all microbatches in flight, token dispatcher, DDP buffers and distributed optimizer allocate what
that rank would. Numbers are meaningless, times too, and what NCCL holds outside of torch is not
there; routing is even, so that a gather of token counts is true.

Every rank is a process of its own; one that the estimate says cannot fit is left out, and said to be.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.memory.peaks import GIB, QWEN_235B, Case, estimate, estimated, train
from benchmarks.models import MODELS

LONG = {"max_position_embeddings": 131072}
WHOLE = {
    "llama-3.1-8b": MODELS["llama-3.1-8b"] | LONG,
    "llama-3.1-70b": MODELS["llama-3.1-70b"] | LONG,
    "qwen3-32b": MODELS["qwen3-32b"] | LONG,
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"] | LONG,
    "qwen3-235b-a22b": QWEN_235B | LONG | {"num_hidden_layers": 94},
    "deepseek-v3": MODELS["deepseek-v3"] | LONG | {"num_nextn_predict_layers": 1},
    "tiny-qwen3": MODELS["tiny-qwen3"] | {"num_hidden_layers": 8},
    "tiny-qwen3-moe": MODELS["tiny-qwen3-moe"] | {"num_hidden_layers": 8},
}


@dataclass
class Rank(Case):
    """The first rank of a pipeline stage of a run on `gpus`."""

    gpus: int = 1
    stage: int = 0

    def __str__(self) -> str:
        return f"{super().__str__()} on {self.gpus}, stage {self.stage}"

    @property
    def number(self) -> int:
        """In Megatron's order: the ranks of a stage follow one another."""
        return self.stage * (self.gpus // self.layout.get("pp", 1))


def ranks(toy: bool) -> list[Rank]:
    """What is measured."""

    def at(model, gpus, stages, layout, *, cp=1, length=4096, recompute="none", fp8=None) -> list[Rank]:
        microbatches = 2 * layout.get("pp", 1)
        return [
            Rank(model, layout, cp, length, recompute, microbatches, fp8, gpus, stage) for stage in stages
        ]

    if toy:
        short: dict = {"length": 64}
        return [
            *at("tiny-qwen3", 16, (0, 1, 3), {"tp": 2, "pp": 4}, **short),
            *at("tiny-qwen3", 8, (0, 3), {"pp": 4, "vpp": 2}, **short),
            *at("tiny-qwen3-moe", 16, (0, 1), {"pp": 2, "ep": 4}, recompute="full", **short),
        ]
    uneven = {"num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 11}
    deepseek = {"tp": 2, "pp": 16, "ep": 64, "etp": 1, "pipeline_model_parallel_layout": "Et*4|(tttt|)*14tmL"}
    fine = "moe_act,layernorm,mla_up_proj,mlp"
    return [
        *at("llama-3.1-70b", 32, (0, 3), {"tp": 8, "pp": 4}, length=8192),
        *at("llama-3.1-70b", 32, (0,), {"tp": 8, "pp": 4, "vpp": 5}, length=8192),
        *at("llama-3.1-70b", 64, (0,), {"tp": 8, "pp": 2}, cp=4, length=32768, recompute="full"),
        *at("llama-3.1-70b", 32, (1,), {"tp": 8, "pp": 4}, length=8192, fp8="blockwise"),
        *at("llama-3.1-70b", 32, (1,), {"tp": 8, "pp": 4}, length=8192, fp8="tensorwise"),
        *at("llama-3.1-8b", 8, (0,), {"tp": 2}, cp=4, length=131072),
        *at("qwen3-32b", 16, (0,), {"tp": 4, "pp": 2}, length=8192, recompute="mlp"),
        *at("qwen3-30b-a3b", 8, (0,), {"ep": 8}, recompute="full"),
        *at("qwen3-30b-a3b", 16, (0,), {"tp": 2, "pp": 2, "ep": 8, "etp": 1}, recompute="moe_act"),
        *at("qwen3-30b-a3b", 16, (0,), {"tp": 2, "pp": 4, "vpp": 3, "ep": 4, "etp": 1}),
        *at("qwen3-30b-a3b", 16, (0,), {"tp": 2, "pp": 2, "ep": 8, "etp": 1}, fp8="blockwise"),
        *at("qwen3-30b-a3b", 8, (0,), {"tp": 2, "ep": 4}, cp=2, length=16384, recompute="full"),
        *at("qwen3-235b-a22b", 64, (0, 1), {"tp": 4, "pp": 8, "ep": 8, "etp": 1} | uneven),
        *at(
            "qwen3-235b-a22b",
            128,
            (0,),
            {"tp": 2, "pp": 8, "ep": 16, "etp": 1} | uneven,
            recompute="moe_act,layernorm",
        ),
        *at("deepseek-v3", 1024, (0, 1, 15), deepseek, recompute=fine),
        *at("deepseek-v3", 1024, (1,), deepseek, recompute="full"),
        *at("deepseek-v3", 1024, (8,), deepseek, recompute="mla_up_proj"),
        *at("deepseek-v3", 1024, (8,), deepseek, fp8="blockwise"),
    ]


def measure(rank: Rank, toy: bool) -> dict:
    """Two steps of a rank, by this process alone."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.memory.training import fusion_is_there, on_cpu
    from reshard.megatron.build import initialize_parallel, without_gpu

    dist.init_process_group("fake", rank=rank.number, world_size=rank.gpus, store=FakeStore())
    total = None if toy else torch.cuda.get_device_properties(0).total_memory
    impl = "local" if toy else "transformer_engine"
    model, layout, report = estimate(rank, rank.gpus, fusion_is_there(), total, impl, WHOLE[rank.model])
    stage = report.stages[rank.stage]
    said = asdict(rank) | estimated(stage)
    if total is not None and stage.allocated * 1.02 > total - 4 * GIB:
        return said | {"left_out": True}
    with without_gpu(), on_cpu():
        initialize_parallel(layout, context_parallel_size=rank.cp, create_gloo_process_groups=False)
        return said | train(model, layout, rank, toy)


def line(row: dict, rank: Rank) -> str:
    if "error" in row:
        return f"{rank}: {row['error']}"
    if "left_out" in row:
        return f"{rank}: left out, the estimate is {row['estimate'] / GIB:.1f} GiB"
    if "peak" not in row:
        return f"{rank}: ran, {row['seconds']:.1f} s; estimate {row['estimate'] / GIB:.4f} GiB"
    off = row["estimate"] - row["peak"]
    good = "ok" if abs(off) <= max(2 * GIB, 0.03 * row["peak"]) else "OFF"
    return (
        f"{rank}: peak {row['peak'] / GIB:.2f} (passes {row['in_passes'] / GIB:.2f}, step "
        f"{row['in_step'] / GIB:.2f}), estimate {row['estimate'] / GIB:.2f} ({off / GIB:+.2f}) {good}; "
        f"built {row['built'] / GIB:.2f}, static {row['estimate_static'] / GIB:.2f}; reserved "
        f"{row['reserved'] / GIB:.2f}, outside {row['outside'] / GIB:.2f}; {row['seconds']:.1f} s"
    )


def worker(asked: dict) -> None:
    """Prints its row as the last line."""
    rank = Rank(**asked["rank"])
    try:
        row = measure(rank, asked["toy"])
    except Exception as error:
        traceback.print_exc(limit=-6)
        row = asdict(rank) | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(row), flush=True)
    os._exit(0)  # nobody answers a process of a fake group that says goodbye


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="", help="ranks whose line has this in it")
    parser.add_argument("--seconds", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the rows here, one a line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    deadline, rows = time.monotonic() + args.seconds, []
    for rank in ranks(args.toy):
        if args.only not in str(rank):
            continue
        left = deadline - time.monotonic()
        if left < 20:
            print(f"{rank}: no time left", flush=True)
            continue
        asked = json.dumps({"toy": args.toy, "rank": asdict(rank)})
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory.ranks", "--worker", asked]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"{rank}: did not end in time", flush=True)
            continue
        last = (done.stdout.strip().splitlines() or [""])[-1]
        row = (
            json.loads(last)
            if last.startswith("{")
            else asdict(rank) | {"error": f"ended with {done.returncode}: {last}"}
        )
        rows.append(row)
        print(line(row, rank), flush=True)
        if args.json:
            args.json.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    off = [(row["estimate"] - row["peak"]) / GIB for row in rows if "peak" in row]
    if off:
        print(f"{len(off)} peaks: estimates are {min(off):+.2f} to {max(off):+.2f} GiB off")


if __name__ == "__main__":
    main()
