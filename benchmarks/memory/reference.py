"""`reshard.memory` compared with mbridge's memory estimator, on steps whose memory was measured.

    python -m benchmarks.memory.reference cases cases.json
    python benchmarks/memory/reference.py mbridge cases.json --estimator MBRIDGE/memory_estimator

The cases are those of ``tests/memory/test_memory_measured.py``, as others published them, and those of a
recorded run of `benchmarks.memory.peaks`. The second line runs in an environment that the estimator
takes: megatron-core 0.13.1, transformers 4.57, Transformer Engine (which it asks for names only),
termcolor, mbridge. It does what the estimator's own page does with a config and sizes, and prints a
table: GiB allocated at most, measured, by `reshard.memory`, by mbridge, and where it is known by
Megatron-LM's ``report_theoretical_memory``.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import types
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "results" / "2026-11-22-memory.md"


def cases() -> list[dict]:
    """Configs, sizes, what was measured, and `reshard.memory`'s estimates."""
    from benchmarks.memory.peaks import GIB, WIDTHS
    from reshard.memory.estimate import estimate_memory
    from tests.memory.test_memory_measured import MEASURED

    found = []
    for name, (model, layout, options, measured, _) in MEASURED.items():
        report = estimate_memory(model, layout, **{"cross_entropy": "te"} | options)
        sizes = {
            size: getattr(layout, size)
            for size in ("tp", "pp", "ep", "etp", "pipeline_model_parallel_layout")
        }
        known = {"gpus": options["gpus"], "cp": options.get("cp", 1), "seq_length": options.get("seq_length", 4096),
                 "recompute": options.get("recompute", "none")}  # fmt: skip
        found += [
            {"name": f"{name}, stage {stage}", "config": dict(model.config), "stage": stage, "measured": gib,
             "reshard": report.stages[stage].allocated / GIB} | sizes | known
            for stage, gib in measured.items()
        ]  # fmt: skip
    row = re.compile(r"\| (\S+) \| (\d+) \| (\S+) \| ([\d.]+) \| ([\d.]+) \| \S+ \| ([\d.]+) ")
    for name, tokens, recompute, *figures in row.findall(RECORDED.read_text(encoding="utf-8")):
        measured, ours, megatron = map(float, figures)
        found.append(
            {
                "name": f"{name}, {tokens}, {recompute}",
                "config": WIDTHS[name],
                "stage": 0,
                "measured": measured,
                "reshard": ours,
                "megatron": megatron,
                "tp": 1,
                "pp": 1,
                "ep": 1,
                "etp": None,
                "pipeline_model_parallel_layout": None,
                "gpus": 1,
                "cp": 1,
                "seq_length": int(tokens),
                "recompute": recompute,
            }
        )
    return found


class Nothing(types.ModuleType):
    """In the place of Megatron-LM's ``megatron.training``, which the estimator imports and, with a
    config, does not call."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None


def by_mbridge(case: dict) -> float:
    """GiB that the estimator says of the case's stage."""
    from estimate_013 import estimate_from_config
    from mbridge import AutoBridge
    from mbridge.core.parallel_states import ParallelStates
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    tp, pp, ep, etp, cp = (case[size] for size in ("tp", "pp", "ep", "etp", "cp"))
    states = ParallelStates(tp_size=tp, pp_size=pp, ep_size=ep, cp_size=cp, vpp_size=None, etp_size=etp)
    ParallelStates.get_default_parallel_states = lambda: states
    hf = {name: value for name, value in case["config"].items() if name != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf), encoding="utf-8")
        config = AutoBridge.from_pretrained(folder).config
    how = case["recompute"]
    config.tensor_model_parallel_size, config.pipeline_model_parallel_size = tp, pp
    config.expert_model_parallel_size, config.context_parallel_size = ep, cp
    config.expert_tensor_parallel_size = etp or config.expert_tensor_parallel_size
    config.recompute_granularity = {"none": None, "full": "full", "block:1": "full"}.get(how, "selective")
    config.recompute_method, config.recompute_num_layers = "block" if how == "block:1" else "uniform", 1
    config.recompute_modules = how.split(",") if config.recompute_granularity == "selective" else []
    config.num_layers_per_virtual_pipeline_stage = None
    if case["pipeline_model_parallel_layout"]:
        config.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            case["pipeline_model_parallel_layout"], pp
        )
    arguments = argparse.Namespace(
        micro_batch_size=1,
        seq_length=case["seq_length"],
        use_distributed_optimizer=True,
        data_parallel_size=case["gpus"] // (tp * pp * cp),
        expert_tensor_parallel_size=etp or 1,
        transformer_impl="transformer_engine",
        fp8=False,
        num_experts=getattr(config, "num_moe_experts", 1),
        moe_grouped_gemm=True,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention="deepseek" in hf["model_type"],
        padded_vocab_size=hf["vocab_size"],
        max_position_embeddings=hf["max_position_embeddings"],
        tie_word_embeddings=False,
        world_size=case["gpus"],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        reports, _ = estimate_from_config(config, arguments)
    return reports[case["stage"]]["total_gb"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cases", "mbridge"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--estimator", type=Path, help="mbridge's memory_estimator")
    options = parser.parse_args()
    if options.what == "cases":
        options.file.write_text(json.dumps(cases()), encoding="utf-8")
        return
    if options.estimator is None:
        parser.error("mbridge needs --estimator")
    names = ["", ".arguments", ".initialize", ".utils", ".yaml_arguments"]
    sys.modules |= {f"megatron.training{name}": Nothing(f"megatron.training{name}") for name in names}
    sys.path.insert(0, str(options.estimator))
    found = json.loads(options.file.read_text(encoding="utf-8"))
    print("| case | measured | reshard | | mbridge | | Megatron-LM |\n|---|---|---|---|---|---|---|")
    apart: dict[str, list[float]] = {"reshard": [], "mbridge": []}
    for case in found:
        case["mbridge"] = by_mbridge(case)
        for name, some in apart.items():
            some.append(case[name] - case["measured"])
        said = [f"{case[name]:.2f} | {case[name] - case['measured']:+.2f}" for name in apart]
        print(
            f"| {case['name']} | {case['measured']:.2f} | {' | '.join(said)} | {case.get('megatron', '')} |"
        )
    for name, some in apart.items():
        mean = sum(map(abs, some)) / len(some)
        within = sum(abs(one) <= 2 for one in some)
        print(
            f"{name}: {min(some):+.2f} to {max(some):+.2f}, {mean:.2f} in the mean, {within} of {len(some)} "
            "within 2 GiB"
        )


if __name__ == "__main__":
    main()
