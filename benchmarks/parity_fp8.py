"""An engine that serves from fp8 blocks: how far its logprobs are from bf16 when vLLM loads a published fp8
checkpoint itself, and when it is refitted, exactly as that or rounded once.

    torchrun --nproc-per-node 1 -m benchmarks.parity_fp8 qwen3-30b-a3b llama-3.1-8b --folder /dev/shm/fp8 --json fp8.json

Random weights at a published shape, with fewer layers (and experts), are written as a Hugging Face checkpoint
and converted, to Megatron-Core and from there to fp8 (``mcore-to-hf --quantize fp8``). Every engine scores the
same prompts and goes on with some of them by CUDA graphs. Checked: refitted exactly, an engine that started
with other weights has the loaded one's parameters, logprobs and tokens to the last bit, in the same graphs,
with no parameter elsewhere, also after 20 refits. Reported: each engine against the bf16 one; and, as a
control, an engine whose trainer has one output projection of another sign.
"""

import argparse
import json
import shutil
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

LAYERS = {"deepseek-v3": 2}
EXPERTS = {"deepseek-v3": {"n_routed_experts": 64, "vocab_size": 32768}}
REFITS = 20


def serve(path: Path, **options):
    """vLLM with CUDA graphs for its decoding, in this process."""
    from vllm import LLM

    return LLM(
        str(path), dtype="bfloat16", distributed_executor_backend="external_launcher", max_model_len=1024, skip_tokenizer_init=True,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        enable_prefix_caching=False, max_logprobs=-1, seed=0, gpu_memory_utilization=0.9, kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True, use_tqdm_on_load=False, **options,
    )  # fmt: skip


def measure(name: str, options: argparse.Namespace) -> dict:
    """All engines of one model."""
    from benchmarks.models import config_of
    from benchmarks.parity import write
    from benchmarks.refit import fingerprints
    from reshard import Layout, hf_to_mcore, mcore_to_hf
    from reshard.engines.vllm.live import VllmModel
    from reshard.models.model import Model
    from reshard.parity import metrics_of, random_prompts
    from reshard.parity.megatron import Megatron
    from reshard.parity.systems import Scoring
    from reshard.parity.vllm import forget_engine, score_with
    from reshard.refit import Members, connect
    from reshard.trainers.megatron import MegatronModel

    config = config_of(name, options.layers or LAYERS.get(name, 4)) | EXPERTS.get(name, {})
    folder = options.folder / name
    hf, mcore, fp8, empty = (folder / kind for kind in ("hf", "mcore", "fp8", "empty"))
    write(hf, config, 0.02, 0.1)
    hf_to_mcore(hf, mcore, Layout())
    mcore_to_hf(mcore, fp8, quantize=True)
    empty.mkdir()
    shutil.copy(fp8 / "config.json", empty)
    model = Model.from_hf(config)
    prompts = random_prompts(9, config["vocab_size"], [32, 128, 512])
    found: dict = {"model": name, "layers": config["num_hidden_layers"], "seconds": {}, "checks": {}, "against_bf16": {}}  # fmt: skip
    scores: dict = {}
    tokens: dict = {}

    def check(what: str, good: bool) -> None:
        print(f"{'ok  ' if good else 'FAIL'} {name}: {what}", flush=True)
        found["checks"][what] = bool(good)

    def note(what: str, llm) -> None:
        from vllm import SamplingParams

        scores[what] = score_with(llm, prompts, Scoring(keep=2), model)
        greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts[:4]], greedy, use_tqdm=False)
        tokens[what] = [
            (*output.outputs[0].token_ids, *(e[t].logprob for t, e in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)))
            for output in outputs
        ]  # fmt: skip
        if what != "bf16":
            metrics = metrics_of(scores["bf16"], scores[what]).to_dict()
            found["against_bf16"][what] = metrics
            print(f"     {name}: {what} against bf16 {metrics}", flush=True)

    def same(a: str, b: str) -> bool:
        equal = all((x.logprobs == y.logprobs).all() for x, y in zip(scores[a], scores[b], strict=True))
        return bool(equal) and tokens[a] == tokens[b]

    def ended(what: str, start: float) -> None:
        found["seconds"][what] = round(time.monotonic() - start, 1)
        forget_engine()

    def held_by(module) -> dict[str, int]:
        # Dummy weights make up scales of the key-value cache too, which nobody reads unless it is in fp8.
        return {k: v for k, v in fingerprints(module).items() if not k.endswith(("_k_scale", "_v_scale"))}

    start = time.monotonic()
    llm = serve(hf)
    note("bf16", llm)
    del llm
    ended("bf16", start)

    start = time.monotonic()
    llm = serve(fp8)
    note("loaded", llm)
    module = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    loaded = held_by(module)
    del llm, module
    ended("loaded", start)

    start = time.monotonic()
    trainer = Megatron(mcore, "bf16", Layout())
    llm = serve(empty, load_format="dummy")
    module = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    before = held_by(module)
    check("dummy weights are others", before != loaded)
    addresses = {key: parameter.data_ptr() for key, parameter in module.named_parameters()}
    for way in ("exact", "best"):
        link = connect(Members.of_process_group(), MegatronModel(trainer.models), VllmModel.from_llm(llm, way == "exact"))  # fmt: skip
        report = link.refit(verify=True)
        if way == "exact":
            found["ways"] = link.describe() if hasattr(link, "describe") else None
            found["first"] = report.to_dict()
        note(way, llm)
        if way == "exact":
            held = held_by(module)
            other = sorted(key for key in loaded if loaded[key] != held.get(key))
            check(f"parameters as loaded ({len(loaded)}, others: {other[:4]})", not other)
            check("logprobs and tokens as loaded", same("loaded", "exact"))
        weight = _output_projection(trainer.models[0])
        weight.data.neg_()
        link.refit()
        if way == "best":
            note("control", llm)
            check("the control is another model", not same("control", "best"))
        weight.data.neg_()
        seconds = [link.refit().total_seconds for _ in range(REFITS)]
        found[f"{way}_ms"] = sorted(seconds)[REFITS // 2] * 1e3
        note(f"{way} again", llm)
        check(f"{way}: the same after {REFITS} refits", same(way, f"{way} again"))
        link.close()
    now = {key: parameter.data_ptr() for key, parameter in module.named_parameters()}
    check("addresses as before", now == addresses)
    trainer.close()
    del llm, module, link
    ended("refitted", start)
    shutil.rmtree(folder)
    return found


def _output_projection(model: torch.nn.Module) -> torch.nn.Parameter:
    """The first layer's, of attention."""
    names = dict(model.named_parameters())
    return next(names[name] for name in names if name.endswith("linear_proj.weight"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="names of benchmarks/models.py")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="default: 4, of DeepSeek-V3 2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks.models import finish, start_processes
    from reshard.engines.vllm.compat import plain_weights

    start_processes()
    results = []
    for name in options.models:
        try:
            with plain_weights():
                results.append(measure(name, options))
        except Exception:
            print(f"{name}: {traceback.format_exc()}", flush=True)
            shutil.rmtree(options.folder / name, ignore_errors=True)
            break  # what an engine that failed holds, nobody gives back
        print(json.dumps(results[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    dist.barrier()
    finish()


if __name__ == "__main__":
    main()
