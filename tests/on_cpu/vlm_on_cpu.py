"""GRPO of a model with its vision tower, on the CPU: a transformers model under FSDP2 and a real vLLM in the same
processes, which is asked about images."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.conversion_mapping import get_model_conversion_mapping

from tests.on_cpu.engine_on_cpu import SMALL_BATCHES, forget, keep_imports_frozen
from tests.tools import vllm_models
from tests.tools.images import PROMPTS, as_trained, asked, picture
from tests.tools.model_classes import class_of

IMAGES = [picture(seed) for seed in range(len(PROMPTS))]
GROUP = 4  # answers to each prompt
WANTED = range(250, 500)  # a token of these is worth 1


def trainer(directory: str) -> torch.nn.Module:
    """The model of a directory, all of it trained, on as many ranks as there are."""
    name = class_of(directory)
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(parameter.requires_grad for parameter in model.parameters())
    return model


def engine(path: str, **options):
    """A vLLM that takes images, over the processes of torchrun unless the options say otherwise."""
    from vllm import LLM

    from reshard.engines.vllm.compat import plain_weights

    vllm_models.register(class_of(path))
    over = {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": dist.get_world_size(),
    }
    with plain_weights():
        return LLM(
            path,
            enforce_eager=True,
            max_model_len=64,
            **SMALL_BATCHES,
            seed=0,
            kv_cache_memory_bytes=1 << 24,
            disable_log_stats=True,
            limit_mm_per_prompt={"image": 1, "video": 0},
            skip_mm_profiling=True,
            **over | options,
        )


def answers(llm) -> list:
    """Of each prompt with its image, the logprobs of its tokens, and four greedy tokens with theirs."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=4, temperature=0, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(list(map(asked, PROMPTS, IMAGES)), sampling, use_tqdm=False)
    return [
        [
            [next(iter(p.values())).logprob for p in o.prompt_logprobs[1:]],
            list(o.outputs[0].token_ids),
            [next(iter(p.values())).logprob for p in o.outputs[0].logprobs],
        ]
        for o in outputs
    ]


def rollout(llm) -> list[list[tuple[list[int], list[float]]]]:
    """A group of sampled answers to each prompt: their tokens, and the logprobs of these."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=GROUP, max_tokens=8, temperature=1, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(list(map(asked, PROMPTS, IMAGES)), sampling, use_tqdm=False)
    return [
        [(list(o.token_ids), [step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)])
         for o in output.outputs]
        for output in outputs
    ]  # fmt: skip


def train(model: torch.nn.Module, optimizer, directory: str, groups) -> float:
    """One step of GRPO, in which each rank has its part of each group; the largest difference between the logprobs of
    the rollout and the policy's own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    furthest, losses = 0.0, []
    for prompt, image, group in zip(PROMPTS, IMAGES, groups, strict=True):
        rewards = torch.tensor([[float(t in WANTED) for t in tokens] for tokens, _ in group]).mean(1)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[rank::size, None]
        mine = group[rank::size]
        batch = as_trained(Path(directory), prompt, image, [tokens for tokens, _ in mine])
        length = len(mine[0][0])
        logprobs = model(**batch).logits[:, -length - 1 : -1].float().log_softmax(-1)
        taken = logprobs.gather(2, batch["input_ids"][:, -length:, None])[..., 0]
        sampled = torch.tensor([of_rollout for _, of_rollout in mine])
        furthest = max(furthest, float((taken - sampled).abs().max()))
        ratio = (taken - sampled).exp()
        losses.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean())
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return furthest


def save(model: torch.nn.Module, like: str, directory: Path) -> str:
    """Save the trainer's model as transformers does it, with what lies beside its weights."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        shutil.copytree(like, directory)
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, state_dict=state)
    dist.barrier()
    return str(directory)


def grpo(hf: str, folder: str, steps: int, options: dict) -> dict:
    """What a vLLM that starts with dummy weights answers after a sync of each step, and what ones answer that have
    loaded what the trainer has saved then; after the last, with what it has kept of the images, and with the tower of
    the first."""
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.requests.gate import Gate
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    keep_imports_frozen()
    model = trainer(hf)
    start = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    llm = engine(hf, load_format="dummy", **options)
    destination = VllmModel.from_llm(llm)
    link = connect(RefitGroup.of_process_group(), FsdpModel(model), destination)
    results: dict = {"served": [], "loaded": [], "furthest": []}
    saved, first, dropping = [], {}, Gate._drop_stale_encodings
    for step in range(steps):
        link.refit(step, verify=True)
        llm.reset_prefix_cache()
        if step + 1 == steps:
            Gate._drop_stale_encodings = lambda gate: None
            results["with what it has kept"] = answers(llm)
            Gate._drop_stale_encodings = dropping
            llm.reset_prefix_cache()
        results["served"].append(answers(llm))
        saved.append(save(model, hf, Path(folder) / f"step{step}"))
        first = first or {name: tensor.clone() for name, tensor in tower_of(destination)}
        if step + 1 < steps:
            results["furthest"].append(train(model, optimizer, hf, rollout(llm)))
    results["untrained"] = [
        name for name, one in model.named_parameters() if torch.equal(start[name], one.full_tensor())
    ]
    for name, tensor in tower_of(destination):
        tensor.copy_(first[name])
    llm.reset_prefix_cache()
    llm.llm_engine.reset_encoder_cache()
    results["without its tower"] = answers(llm)
    del llm, destination, link, model, optimizer
    forget()
    for directory in saved:
        fresh = engine(directory, **options)
        results["loaded"].append(answers(fresh))
        del fresh
        forget()
    return results


def tower_of(destination) -> list[tuple[str, torch.Tensor]]:
    parameters = destination.module.named_parameters()
    return [(name, tensor.data) for name, tensor in parameters if name.startswith("visual.")]


def apart(hf: str, port: int) -> list[list[float]]:
    """Of a vLLM whose core and worker are processes of their own, after a sync of the model and of another tower: how
    far what it answers about the same images is from the policy's logprobs, and from those before."""
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.pop(name, None)
    model = getattr(transformers, class_of(hf)).from_pretrained(hf, dtype=torch.float32)
    llm = engine(
        hf, load_format="dummy", dtype="float32", distributed_executor_backend="mp", tensor_parallel_size=1,
        worker_extension_cls="reshard.engines.vllm.worker.RefitExtension",
    )  # fmt: skip
    address, found = f"127.0.0.1:{port}", []
    with ThreadPoolExecutor(1) as thread:

        def both(mine, method: str, *arguments):
            theirs = thread.submit(llm.collective_rpc, method, args=arguments)
            done = mine()
            theirs.result()
            return done

        def meet():
            return connect(RefitGroup.join(address, 0, 2, timeout=120), FsdpModel(model))

        link = both(meet, "reshard_connect", address, 1, 2, "auto", 1 << 25, 120.0)
        before: list[torch.Tensor] = []
        for step in range(2):
            if step:
                with torch.no_grad():
                    for parameter in model.model.visual.parameters():
                        parameter.add_(torch.randn(parameter.shape) * 0.05)
            both(lambda: link.refit(step), "reshard_refit", step)  # noqa: B023
            llm.reset_prefix_cache()
            answered = answers(llm)
            expected = []
            for prompt, image, (_, tokens, _) in zip(PROMPTS, IMAGES, answered, strict=True):
                batch = as_trained(Path(hf), prompt, image, [tokens])
                with torch.no_grad():
                    logprobs = model(**batch).logits[0, -5:-1].log_softmax(-1)
                expected.append(logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0])
            served = [torch.tensor(logprobs) for _, _, logprobs in answered]
            far = max(float((a - b).abs().max()) for a, b in zip(served, expected, strict=True))
            moved = max(
                (float((a - b).abs().max()) for a, b in zip(served, before, strict=False)), default=0.0
            )
            found.append([far, moved])
            before = served
    return found
