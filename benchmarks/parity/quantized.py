"""An engine that serves quantized weights: is it the same whether vLLM loads and quantizes them
itself, loads them from a Megatron checkpoint, or is refitted; and how far are its logprobs from
bf16?

    torchrun --nproc-per-node 1 -m benchmarks.parity.quantized qwen3-30b-a3b --folder /dev/shm/fp8
        [--ways published fp8 mxfp8] [--json FILE]

Random weights at a published shape, with fewer layers (and experts), are written as a Hugging Face
checkpoint and converted to Megatron-Core. `published` is the checkpoint in fp8 blocks, made by
vLLM's own function, which vLLM then reads from a config; `published-fp8_per_channel`,
`published-int8_per_channel`, `published-fp8_per_tensor`, `published-fp8_per_block`,
`published-int4_per_group`, `published-int4_per_group_32`, `published-int4_per_channel` and
`published-nvfp4` are in the format of compressed-tensors, as ``mcore-to-hf --quantize`` writes it
where it does; `published-fp8_weight_only` and `published-nvfp4_w4a4` are of these the ones with
plain and with quantized activations; `modelopt-nvfp4` is as ModelOpt writes it; any other way is
vLLM's own ``quantization=``. Every engine scores the same prompts and goes on with some of them by
CUDA graphs. Checked: an engine that started with other weights and is refitted (blocks: exactly)
has the loaded one's parameters, logprobs and tokens to the last bit, in the same graphs, with no
parameter elsewhere, also after 20 refits; and so has one that vLLM's loader fills from the Megatron
checkpoint (`published`: those of the checkpoint that ``mcore-to-hf --quantize fp8`` writes, whose
arithmetic is the CPU's). An engine that says other logprobs when it is asked again, as those with
Marlin's kernels may, is held to its parameters only. Reported: each engine against the bf16 one,
blocks that are rounded once among them; as a control, an engine whose trainer has one output
projection of another sign; and a refit's milliseconds beside those of vLLM's own reloading (full
tensors, ``load_weights``, quantized layer by layer).
"""

import argparse
import json
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parity.quantized_checkpoints import (
    ALL_PUBLISHED,
    INT4,
    MODELOPT,
    PUBLISHED,
    W4A4,
    WEIGHT_ONLY,
    Places,
    write_published,
)

LAYERS = {"deepseek-v3": 2}
EXPERTS = {"deepseek-v3": {"n_routed_experts": 64, "vocab_size": 32768}}
REFITS = 20
# Served, or its experts are, by Marlin: may differ from itself.
UNSTEADY = ("mxfp8", "published-fp8_per_tensor", *INT4, "published-nvfp4", WEIGHT_ONLY, W4A4, MODELOPT)


def serve(path: Path, **options):
    """vLLM with CUDA graphs for its decoding, in this process, on a part of its GPU."""
    from vllm import LLM

    from benchmarks.processes import device

    gpu = device() == "cuda"
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    options |= {"compilation_config": graphs} if gpu else {"enforce_eager": True}
    return LLM(
        str(path),
        dtype="bfloat16",
        distributed_executor_backend="external_launcher",
        max_model_len=1024,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_logprobs=-1,
        seed=0,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << (30 if gpu else 27),
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **options,
    )


def module_of(llm) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def held_by(module: torch.nn.Module) -> dict[str, int]:
    """Fingerprints. Dummy weights make up scales of attention too, which nobody reads unless the
    key-value cache is in fp8; nor orders of columns and scales of inputs, where layers have room
    for them and no kernel takes any."""
    from benchmarks.refits.refit import fingerprints

    unread = (
        "_k_scale",
        "_v_scale",
        "_q_scale",
        "_prob_scale",
        "_g_idx",
        "_g_idx_sort_indices",
        "input_global_scale",
        "input_global_scale_inv",
        "alpha",
    )
    return {k: v for k, v in fingerprints(module).items() if not k.endswith(unread)}


def copied(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Of parameters that differ, by the last parts of their names: the largest share of numbers
    that do, and the largest difference relative to the largest number."""
    found: dict[str, tuple[float, float]] = {}
    for name, one in a.items():
        if not one.numel():
            continue
        one, other = (some.float() for some in (one, b[name]))
        share, most = float((one != other).float().mean()), float((one - other).abs().max() / one.abs().max())
        if share:
            kind = ".".join(name.split(".")[-3:])
            known = found.get(kind, (0.0, 0.0))
            found[kind] = max(known[0], share), max(known[1], most)
    return found


def measure(name: str, options: argparse.Namespace) -> dict:
    """All engines of one model."""
    from benchmarks.models import config_of
    from benchmarks.parity.bf16 import write
    from reshard import MegatronLayout, hf_to_mcore
    from reshard.models.model import Model
    from reshard.parity import random_prompts
    from reshard.parity.systems.megatron import Megatron

    config = config_of(name, options.layers or LAYERS.get(name, 4)) | EXPERTS.get(name, {})
    folder = options.folder / name
    places = Places(*(folder / kind for kind in Places._fields))
    write(places.hf, config, 0.02, 0.1)
    hf_to_mcore(places.hf, places.mcore, MegatronLayout())
    write_published(places, options.ways)
    model = Model.from_hf(config)
    engines = Engines(name, model, random_prompts(9, config["vocab_size"], [32, 128, 512]))
    with engines.one("bf16", places.hf) as llm:
        engines.note("bf16", llm)
    trainer = Megatron(places.mcore, "bf16", MegatronLayout())
    found = {way: compare(way, engines, places, trainer) for way in options.ways}
    trainer.close()
    return {"model": name, "layers": config["num_hidden_layers"], "seconds": engines.seconds, "checks": engines.checks,
            "against_bf16": engines.against_bf16, "ways": found}  # fmt: skip


class Engines:
    """What the engines of one model said, one after the other."""

    def __init__(self, name: str, model, prompts: list) -> None:
        self.name, self.model, self.prompts = name, model, prompts
        self.scores: dict = {}
        self.tokens: dict = {}
        self.seconds: dict[str, float] = {}
        self.checks: dict[str, bool] = {}
        self.against_bf16: dict[str, dict] = {}

    @contextmanager
    def one(self, what: str, path: Path, **options):
        """An engine, which is gone afterward."""
        from reshard.parity.systems.vllm import forget_engine

        start = time.monotonic()
        holder = [serve(path, **options)]
        yield holder[0]
        holder.clear()
        self.seconds[what] = round(time.monotonic() - start, 1)
        forget_engine()

    def check(self, what: str, good: bool) -> None:
        print(f"{'ok  ' if good else 'FAIL'} {self.name}: {what}", flush=True)
        self.checks[what] = bool(good)

    def note(self, what: str, llm) -> None:
        """What it says of the prompts, and how it goes on with some."""
        from vllm import SamplingParams

        from reshard.parity import metrics_of
        from reshard.parity.systems.base import ScoringOptions
        from reshard.parity.systems.outputs import score_with

        self.scores[what] = score_with(llm, self.prompts, ScoringOptions(keep=2), self.model)
        greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in self.prompts[:4]], greedy, use_tqdm=False)
        self.tokens[what] = []
        for [output] in [result.outputs for result in outputs]:
            steps = zip(output.token_ids, output.logprobs, strict=True)
            self.tokens[what].append([(token, step[token].logprob) for token, step in steps])
        if what != "bf16":
            metrics = metrics_of(self.scores["bf16"], self.scores[what]).to_dict()
            self.against_bf16[what] = metrics
            print(f"     {self.name}: {what} against bf16 {metrics}", flush=True)

    def same(self, a: str, b: str) -> bool:
        equal = all(
            (x.logprobs == y.logprobs).all() for x, y in zip(self.scores[a], self.scores[b], strict=True)
        )
        return bool(equal) and self.tokens[a] == self.tokens[b]

    def repeats(self, way: str) -> bool:
        """Whether one engine says the same when it is asked again."""
        return self.same(f"{way} loaded", f"{way} loaded again")

    def check_same(self, what: str, way: str, a: str, b: str) -> None:
        """Logprobs and tokens of two engines, where one alone has the same twice."""
        if self.repeats(way):
            self.check(what, self.same(a, b))
        else:
            print(f"     {self.name}: {what}: not asked, one engine differs from itself", flush=True)
            self.check(f"{way}: one engine says the same twice", way in UNSTEADY)


def compare(way: str, engines: Engines, places: Places, trainer) -> dict:
    """Loaded by vLLM, loaded from Megatron's checkpoint, and refitted, all quantized in one way."""
    published = way in ALL_PUBLISHED
    config = places.hf
    if published:
        config = places.fp8 if way == PUBLISHED else places.compressed(way)
    options = served = {} if published else {"quantization": way}
    with engines.one(f"{way} loaded", config, **options) as llm:
        engines.note(f"{way} loaded", llm)
        engines.note(f"{way} loaded again", llm)
        loaded, numbers = held_by(module_of(llm)), copied(module_of(llm))
        del llm
    found: dict = {"repeats itself": engines.repeats(way)}
    as_file, source = loaded, "loaded"
    if way == PUBLISHED:
        with engines.one(f"{way} converted", places.converted) as llm:
            engines.note(f"{way} converted", llm)
            as_file, source = held_by(module_of(llm)), "converted"
            found["converted apart"] = apart(numbers, copied(module_of(llm)))
            print(f"     {engines.name}: converted apart {found['converted apart']}", flush=True)
            del llm
    if published:
        read = json.loads((config / "config.json").read_text())
        served = {"hf_overrides": {"quantization_config": read["quantization_config"]}}
    if way != W4A4:  # for which a Megatron checkpoint has no scales of inputs
        with engines.one(f"{way} served", places.mcore, load_format="reshard", **served) as llm:
            engines.note(f"{way} served", llm)
            wrong = others(held_by(module_of(llm)), as_file)
            what = f"{way}, from the Megatron checkpoint"
            engines.check(f"{what}: parameters as {source} (others: {wrong[:4]})", not wrong)
            engines.check_same(
                f"{what}: logprobs and tokens as {source}", way, f"{way} {source}", f"{way} served"
            )
            del llm
    with (
        tempfile.TemporaryDirectory() as empty,
        engines.one(f"{way} refitted", _alone(config, empty), load_format="dummy", **options) as llm,
    ):
        found |= refitted(way, engines, llm, trainer, loaded, numbers)
        del llm
    print(f"     {engines.name}: {way} {found}", flush=True)
    return found


def others(held: dict, wanted: dict) -> list[str]:
    """Names of parameters that are not as they should be."""
    return sorted(key for key in wanted if wanted[key] != held.get(key))


def refitted(way: str, engines: Engines, llm, trainer, loaded: dict, numbers: dict) -> dict:
    """An engine that began with other weights, after refits, against what one has that has `loaded`
    them."""
    from benchmarks.refits.refit import Today, measured
    from reshard.engines.vllm.live import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    found: dict = {}
    module = module_of(llm)
    engines.check(f"{way}: dummy weights are others", held_by(module) != loaded)
    addresses = {key: parameter.data_ptr() for key, parameter in module.named_parameters()}
    blocks = way == PUBLISHED or ("block" in way and way not in ALL_PUBLISHED)
    for mode in ("exact", "best") if blocks else ("exact",):
        engine = VllmModel.from_llm(llm, match_vllm_rounding=mode == "exact")
        link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), engine)
        before = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        report = link.refit(verify=True)
        what = f"{way} {mode}"
        engines.note(what, llm)
        if mode == "exact":
            found |= {"quantized": link.describe()["quantized"], "first": report.to_dict()}
            wrong = others(held_by(module), loaded)
            if wrong:
                print(f"     {engines.name}: refitted apart {apart(numbers, copied(module))}", flush=True)
            engines.check(f"{way}: parameters as loaded ({len(loaded)}, others: {wrong[:4]})", not wrong)
            engines.check_same(f"{way}: logprobs and tokens as loaded", way, f"{way} loaded", what)
        weight = _output_projection(trainer.models[0])
        weight.data.neg_()
        link.refit()
        if mode == "exact":
            engines.note(f"{way} control", llm)
            engines.check(f"{way}: the control is another model", not engines.same(f"{way} control", what))
        weight.data.neg_()
        seconds = [link.refit().total_seconds for _ in range(REFITS)]
        found[f"{mode}_ms"] = sorted(seconds)[REFITS // 2] * 1e3
        if torch.cuda.is_available():
            found[f"{mode}_extra_bytes"] = before - torch.cuda.mem_get_info()[0]
        engines.note(f"{what} again", llm)
        engines.check_same(f"{what}: the same after {REFITS} refits", way, what, f"{what} again")
        link.close()
    now = {key: parameter.data_ptr() for key, parameter in module.named_parameters()}
    engines.check(f"{way}: addresses as before", now == addresses)
    if way not in ALL_PUBLISHED:
        today = Today(MegatronModel(trainer.models), engines.model, module, llm.llm_engine.model_config)
        today.run()
        if torch.cuda.is_available():
            seconds, found["today_extra_bytes"] = measured(today.run, 3)
            found["today_ms"] = seconds * 1e3
        wrong = others(held_by(module), loaded)
        engines.check(
            f"{way}: parameters as loaded after vLLM's own reloading (others: {wrong[:4]})", not wrong
        )
    return found


def _alone(source: Path, folder: str) -> Path:
    """A directory with the config of `source` and nothing else."""
    shutil.copy(source / "config.json", folder)
    return Path(folder)


def _output_projection(model: torch.nn.Module) -> torch.nn.Parameter:
    """The first layer's, of attention."""
    names = dict(model.named_parameters())
    return next(names[name] for name in names if name.endswith("linear_proj.weight"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a name of benchmarks/models.py")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=[PUBLISHED])
    parser.add_argument("--layers", type=int, help="default: 4, of DeepSeek-V3 2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from benchmarks.processes import finish, start_processes
    from reshard.engines.vllm.compat import plain_weights

    start_processes()
    try:
        with plain_weights():
            result = measure(options.model, options)
        print(json.dumps(result), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    finally:
        shutil.rmtree(options.folder / options.model, ignore_errors=True)
    dist.barrier()
    finish()


if __name__ == "__main__":
    main()
