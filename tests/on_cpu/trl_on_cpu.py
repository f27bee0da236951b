"""TRL's trainer of GRPO and a real vLLM without a GPU, whose weights go by refits; started as `tests.starting.ranks`
says, in an environment with TRL."""

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests.starting.ranks import caught
from tests.tools.disk import until
from tests.tools.images import picture, processor_of
from tests.tools.model_classes import WITH_TOWER, class_of

if "TRL_PACKAGES" in os.environ:
    sys.path.insert(0, os.environ["TRL_PACKAGES"])
TEXTS = [f"w{5 + i} w{200 + 7 * i} w{400 + 3 * i}" for i in range(8)]
WANTED = range(250, 500)  # a token of these is worth 1
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def worth(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of each completion."""
    return [sum(token in WANTED for token in ids) / len(ids) for ids in completion_ids]


def with_fsdp2() -> None:
    """Have accelerate shard models by FSDP 2, which it does on accelerators alone."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip
    made = AcceleratorState.__init__

    def of_accelerators(state, *args, **options):
        if PartialState._shared_state.get("distributed_type") is DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        made(state, *args, **options)

    AcceleratorState.__init__ = of_accelerators


def trainer_of(
    directory: str,
    out: Path,
    lora: Any = None,
    reward: Callable[..., list[float]] = worth,
    data: dict[str, list] | None = None,
    cache: int = 1 << 24,
    **options: Any,
):
    """A trainer of GRPO of a directory's model, for which vLLM generates with a cache of so many bytes, by default of a
    few texts or of texts with pictures, in two steps."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from vllm import LLM

    from reshard.engines.vllm.compat import plain_weights

    # TRL has no option for these: an engine without a GPU compiles nothing.
    vllm_generation.LLM = partial(
        LLM, enforce_eager=True, kv_cache_memory_bytes=cache, disable_log_stats=True, skip_mm_profiling=True
    )
    settings = dict(
        use_vllm=True, use_cpu=True, bf16=False, max_steps=2, learning_rate=1e-2, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=8, report_to=[], save_strategy="no", seed=0,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    name = class_of(directory)
    if name in WITH_TOWER:
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        reads = processor_of(name)
        reads.chat_template = reads.tokenizer.chat_template = TEMPLATE
        asked = [[{"role": "user", "content": text}] for text in ("w5", "w6", "w7", "w8")]
        few = {"prompt": asked, "image": [picture(seed) for seed in range(len(asked))]}
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        reads = AutoTokenizer.from_pretrained(directory, padding_side="left")
        reads.pad_token = reads.pad_token or "w0"
        few = {"prompt": TEXTS}
    config, rows = GRPOConfig(str(out), **settings | options), Dataset.from_dict(data or few)
    with plain_weights():
        return GRPOTrainer(model, reward, config, rows, processing_class=reads, peft_config=lora)


def served_model(generation) -> torch.nn.Module:
    """The model that vLLM serves in this process."""
    return generation.llm.llm_engine.model_executor.driver_worker.model_runner.model


def served_by(generation) -> dict[str, torch.Tensor]:
    """The parameters of that."""
    return {name: parameter.detach() for name, parameter in served_model(generation).named_parameters()}


def held(generation) -> dict[str, torch.Tensor]:
    """Copies of these."""
    return {name: tensor.clone() for name, tensor in served_by(generation).items()}


def colocated(rank: int, directory: str, folder: str, with_lora: bool) -> dict:
    """A training of two steps, with vLLM over both ranks: what that serves after a last sync, and what TRL's own sync
    leaves there; and what is said of a trainer that no refit covers."""
    from peft import LoraConfig

    from reshard.integrations import trl

    with_fsdp2()
    trl.use(verify=True, timeout=120)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if with_lora else None
    trainer = trainer_of(
        directory, Path(folder) / "out", lora, vllm_mode="colocate", vllm_tensor_parallel_size=2,
        vllm_gpu_memory_utilization=0.05, vllm_max_model_length=64,
    )  # fmt: skip
    generation = trainer.vllm_generation
    loaded = held(generation)
    trainer.train()
    parameters = [*trainer.model.parameters()]
    weights = [parameter.detach().clone() for parameter in parameters]

    def left_by(sync: Callable[[Any], None]) -> dict[str, torch.Tensor]:
        with torch.no_grad():  # a LoRA that was merged leaves other bits
            for parameter, before in zip(parameters, weights, strict=True):
                parameter.copy_(before)
        for tensor in served_by(generation).values():
            tensor.zero_()
        sync(generation)
        return held(generation)

    ours, theirs = left_by(type(generation).sync_weights), left_by(trl._TRLS_SYNC)
    results = {
        "unequal": [name for name in ours if not torch.equal(ours[name], theirs[name])],
        "changed": {name: not torch.equal(ours[name], loaded[name]) for name in ours},
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters),
        "syncs": generation._reshard_sync.version,
    }
    generation._dist.fsdp_version = 1
    results["a server"] = caught(lambda: trl.server_sync(generation))
    generation._reshard_sync = trl.ColocatedSync(generation)
    generation._dist.fsdp_version = 2
    left = left_by(type(generation).sync_weights)
    results["left"] = [name for name in left if not torch.equal(left[name], theirs[name])]
    results["why"], results["left syncs"] = generation._reshard_sync.why, generation._reshard_sync.version
    model, of_trainer, sharding = generation.model, generation.accelerator, generation._dist
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"))
    results["reasons"] = [
        trl.left_to_trl(*each, sharding)
        for each in ((model, of_trainer), (model, on_a_gpu), (quantized(), of_trainer))
    ]
    return results


def quantized() -> torch.nn.Module:
    """A model as transformers marks one with codes in tensors of another dtype."""
    model = torch.nn.Linear(2, 2)
    model.is_quantized = True
    return model


def served(rank: int, directory: str, folder: str, url: str, port: int) -> dict:
    """A training of two steps for which a server generates, and after which TRL saves the model: the server's digests
    before, and after a last sync; then, when it was started anew, what a sync says, whether the server is paused then,
    and its digest after the next one."""
    from trl.generation.vllm_client import VLLMClient

    from reshard import digest
    from reshard.integrations import trl

    with_fsdp2()
    trl.use(verify=True, timeout=120)
    before = digest(url).text if rank == 0 else ""
    trainer = trainer_of(
        directory, Path(folder) / "out", vllm_mode="server", vllm_server_base_url=url, vllm_group_port=port
    )
    trainer.train()
    generation = trainer.vllm_generation
    generation.sync_weights()
    after = digest(url).text if rank == 0 else ""
    results = {"before": before, "after": after, "syncs": generation._reshard_sync.version}
    trainer.save_model(f"{folder}/saved")
    (Path(folder) / "is trained").touch()
    until(lambda: (Path(folder) / "is started").exists())
    results["gone"] = caught(generation.sync_weights)
    if rank == 0:
        with urlopen(f"{url}/is_paused") as answer:
            results["paused"] = json.loads(answer.read())["is_paused"]
    torch.distributed.barrier()
    generation.sync_weights()
    results["again"] = digest(url).text if rank == 0 else ""
    generation.vllm_client = VLLMClient(url) if rank == 0 else None
    results["late"] = caught(lambda: trl.server_sync(generation))
    return results


def refused(rank: int, url: str) -> dict:
    """What is said to a server that takes weights in another way, and of wrong options."""
    from reshard.integrations import trl

    return {
        "another backend": caught(trl.ReshardClient(url).init_communicator),
        "wrong options": [
            caught(partial(trl.use, **wrong))
            for wrong in ({"verify": "yes"}, {"backend": "ipc"}, {"timeout": 0})
        ],
    }


def attention(query, key, value, ends, key_ends, *_, softmax_scale, **__) -> torch.Tensor:
    """What FlashAttention's kernel for rows one after the other computes, which a CPU does not have."""
    outputs = []
    for (begin, end), (first, last) in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        rows, columns = end - begin, last - first
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        q, k, v = (
            one.transpose(0, 1)[None] for one in (query[begin:end], key[first:last], value[first:last])
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class Noted:
    """A transfer of weights of another kind: the names that it was given, and the calls."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.names += [name for name, _ in weights]

    def resume(self) -> None:
        self.calls.append("resume")


def asynchronous(rank: int, directory: str, folder: str, url: str) -> dict:
    """A training of two steps by TRL's asynchronous GRPO, while a server generates: the server's digests before and
    after, when TRL has saved the model; and what is called of a transfer that the trainer is given."""
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from reshard import digest
    from reshard.integrations import trl_async

    with_fsdp2()
    trl_async.use(verify=True, timeout=120)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # of a GPU
    before = digest(url).text if rank == 0 else ""
    reads = AutoTokenizer.from_pretrained(directory, padding_side="left")
    reads.chat_template = qwen3_chat_template  # TRL parses the answers of known ones
    reads.pad_token = reads.eos_token = "w0"
    settings = dict(
        use_cpu=True, bf16=False, max_steps=2, learning_rate=1e-2, num_generations=4, per_device_train_batch_size=4,
        max_completion_length=8, report_to=[], save_strategy="no", seed=0, gradient_checkpointing=False,
        disable_tqdm=True, vllm_server_base_url=url, max_staleness=4,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        directory, worth, AsyncGRPOConfig(f"{folder}/out", **settings), processing_class=reads,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in TEXTS]}),
    )  # fmt: skip
    trainer.train()
    results = {"before": before, "after": digest(url).text if rank == 0 else ""}
    results |= {"syncs": trainer._reshard_sync.version, "version": trainer.model_version}
    trainer.save_model(f"{folder}/saved")
    trainer.weight_transfer = given = Noted()
    trainer._sync_weight()
    results |= {"called": given.calls, "given": len(given.names), "syncs then": trainer._reshard_sync.version}
    return results
