"""Parity at real widths: transformers, Megatron-Core, vLLM as it loads a checkpoint, and vLLM
refitted from Megatron-Core.

    torchrun --nproc-per-node 2 -m benchmarks.parity.bf16 llama-3.1-8b qwen3-30b-a3b --folder /dev/shm/parity
        --json parity.json

Random weights at a published shape, with fewer layers, are written as a Hugging Face checkpoint and
converted. Each system scores the same prompts in bf16, transformers also in fp32. Reported: each
system's own error against fp32, Megatron-Core against vLLM next to the larger of their two errors,
whether the refitted vLLM says exactly what the loaded one says, and where tokens were routed.
"""

import argparse
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

LAYERS = {"deepseek-v3": 2}


def write(folder: Path, config: dict, std: float, vector_std: float) -> None:
    """Write a Hugging Face checkpoint of random weights: matrices around zero, vectors around one
    (norms) or zero (biases)."""
    from safetensors.torch import save_file

    from benchmarks.processes import device
    from reshard.megatron.parameters import expand
    from reshard.models.model import Model

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = Model.from_hf(config)
    torch.manual_seed(0)
    tensors: dict = {}
    mapping = expand(model)
    for name, shape in mapping.shapes.items():
        if name in mapping.copies:
            continue
        values = torch.randn(shape, device=device(), dtype=torch.float32) * (
            std if len(shape) == 2 else vector_std
        )
        if len(shape) == 1 and "norm" in name:
            values += 1
        tensors[name] = values.to(
            torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        ).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def correlation(scores: dict, a: str, b: str) -> float:
    """Pearson's of two systems' errors against fp32: 0 if they err independently, and then
    differ by the root of two more than each errs."""
    errors = [
        np.concatenate(
            [x.logprobs - y.logprobs for x, y in zip(scores[n], scores["transformers fp32"], strict=True)]
        )
        for n in (a, b)
    ]
    return float(np.corrcoef(*errors)[0, 1])


def measure(name: str, options: argparse.Namespace) -> dict:
    """Score one model in all systems and compare."""
    from benchmarks.models import MODELS, config_of
    from benchmarks.processes import device
    from reshard import MegatronLayout, VllmLayout, hf_to_mcore
    from reshard.models.model import Model
    from reshard.parity import compare_scores, metrics_of, random_prompts
    from reshard.parity.limits import Limits
    from reshard.parity.metrics import routing_of
    from reshard.parity.systems.base import ScoringOptions, System, SystemOptions, scores_of
    from reshard.parity.systems.huggingface import HuggingFace
    from reshard.parity.systems.megatron import Megatron
    from reshard.parity.systems.refitted import RefittedVllm
    from reshard.parity.systems.vllm import Vllm

    size, rank = dist.get_world_size(), dist.get_rank()
    layers = options.layers or LAYERS.get(name, 4)
    config = (
        config_of(name, layers)
        if name in MODELS
        else json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    )
    model = Model.from_hf(config)
    moe = model.num_experts > 0
    layout = (
        MegatronLayout(tp=size, ep=size if moe else 1, etp=1 if moe else None)
        if not options.pp
        else MegatronLayout(tp=size // options.pp, pp=options.pp)
    )
    folder = options.folder / Path(name).name
    hf, mcore = folder / "hf", folder / "mcore"
    if rank == 0:
        write(hf, config, options.std, options.vector_std)
    dist.barrier()
    hf_to_mcore(hf, mcore, layout)
    served = VllmLayout(tp=size, expert_parallel=moe and options.vllm_ep)
    opened = SystemOptions("bf16", layout, engine=served)
    systems: dict[str, Callable[[], System]] = {
        "transformers fp32": lambda: HuggingFace(hf, "fp32"), "transformers": lambda: HuggingFace(hf, "bf16"),
        "megatron": lambda: Megatron(mcore, "bf16", layout), "vllm loaded": lambda: Vllm(hf, opened),
        "vllm refitted": lambda: RefittedVllm(mcore, opened),
    }  # fmt: skip
    prompts = random_prompts(options.prompts, config["vocab_size"], options.lengths)
    scores, seconds, failed = {}, {}, {}

    @contextmanager
    def noting_failure(what: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            failed[what] = traceback.format_exc()[-1500:]
            if rank == 0:
                print(f"{name}: {what} failed\n{traceback.format_exc()}", flush=True)

    for system_name, make in systems.items():
        start, system = time.monotonic(), None
        with noting_failure(system_name):
            system = make()
            scores[system_name] = scores_of(system, prompts, ScoringOptions(keep=4, routing=moe))
            if system_name == "megatron" and device() == "cuda":
                with noting_failure("megatron packed"):
                    scores["megatron packed"] = scores_of(
                        system, prompts, ScoringOptions(batch_size=len(prompts), packed=True)
                    )
        if system is not None:
            system.close()
        seconds[system_name] = round(time.monotonic() - start, 1)
    found: dict = {
        "model": name,
        "layers": config["num_hidden_layers"],
        "std": options.std,
        "vector_std": options.vector_std,
        "megatron": str(layout),
        "vllm": str(served),
        "prompts": [len(p) for p in prompts],
        "seconds": seconds,
        "failed": failed,
        "error_against_fp32": {},
        "routing": {},
    }
    for other in ("transformers", "megatron", "megatron packed", "vllm loaded", "vllm refitted"):
        if other in scores and "transformers fp32" in scores:
            found["error_against_fp32"][other] = metrics_of(
                scores["transformers fp32"], scores[other]
            ).to_dict()
    for a, b in (
        ("megatron", "vllm refitted"),
        ("megatron", "transformers"),
        ("vllm loaded", "vllm refitted"),
    ):
        if a in scores and b in scores:
            metrics, exceeded = compare_scores(scores[a], scores[b], Limits.of_dtype("bf16"))
            found[f"{a} to {b}"] = metrics.to_dict() | {"exceeded": exceeded}
            routing = routing_of(scores[a], scores[b], model)
            if routing is not None:
                found["routing"][f"{a} to {b}"] = routing.to_dict() | {"sentence": routing.sentence}
            if "transformers fp32" in scores:
                found[f"{a} to {b}"]["correlation_of_errors"] = correlation(scores, a, b)
    if "megatron packed" in scores:
        found["megatron to megatron packed"] = metrics_of(
            scores["megatron"], scores["megatron packed"]
        ).to_dict()
    errors = [
        found["error_against_fp32"].get(other, {}).get("mean_abs") for other in ("megatron", "vllm refitted")
    ]
    if all(errors) and "megatron to vllm refitted" in found:
        found["ratio_to_larger_error"] = found["megatron to vllm refitted"]["mean_abs"] / max(errors)
    if "vllm loaded to vllm refitted" in found:
        found["refitted_equals_loaded"] = found["vllm loaded to vllm refitted"]["max_abs"] == 0.0
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return found


def show(found: dict) -> None:
    print(
        f"\n{found['model']}, {found['layers']} layers, std {found['std']} and {found['vector_std']}, "
        f"Megatron {found['megatron']}, vLLM {found['vllm']}: {found['seconds']}"
    )
    for name, metrics in found["error_against_fp32"].items():
        print(
            f"  {name} against fp32: mean_abs {metrics['mean_abs']:.5f}, token_mult_prob_error "
            f"{metrics['token_mult_prob_error']:.5f}"
        )
    for name in ("megatron to vllm refitted", "megatron to transformers", "vllm loaded to vllm refitted"):
        if name in found:
            m = found[name]
            print(
                f"  {name}: mean_abs {m['mean_abs']:.5f}, max_abs {m['max_abs']:.4f}, "
                f"token_mult_prob_error {m['token_mult_prob_error']:.5f}, kl {m['kl']}, argmax "
                f"{m['argmax_agreement']:.4f}, correlation of errors "
                f"{m.get('correlation_of_errors')} {m['exceeded']}"
            )
    if "megatron to megatron packed" in found:
        print(f"  megatron packed or not: mean_abs {found['megatron to megatron packed']['mean_abs']:.5f}")
    for what, error in found["failed"].items():
        print(f"  {what} failed: {error.splitlines()[-1]}")
    for name, routing in found["routing"].items():
        print(f"  routing, {name}: {routing['sentence']}")
    print(
        f"  ratio to the larger error {found.get('ratio_to_larger_error')}, refitted equals loaded "
        f"{found.get('refitted_equals_loaded')}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", help="names of benchmarks/models.py, or directories with a config.json"
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="default: 4, of DeepSeek-V3 2")
    parser.add_argument(
        "--pp", type=int, default=0, help="Megatron's pipeline stages (default: TP over all ranks, EP too)"
    )
    parser.add_argument("--vllm-ep", action="store_true")
    parser.add_argument("--std", type=float, default=0.02, help="standard deviation of matrices")
    parser.add_argument(
        "--vector-std",
        type=float,
        default=0.1,
        help="of norms and biases (default 0.1); transformers begins with 0",
    )
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks.processes import finish, start_processes
    from reshard.engines.vllm.compat import plain_weights

    start_processes()
    results = []
    for name in options.models:
        try:
            # without a GPU, both engines serve from weights of one arrangement, by the same kernels
            with plain_weights():
                results.append(measure(name, options))
        except Exception:
            print(f"rank {dist.get_rank()}, {name}: {traceback.format_exc()}", flush=True)
            continue
        if dist.get_rank() == 0:
            show(results[-1])
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    finish()


if __name__ == "__main__":
    main()
