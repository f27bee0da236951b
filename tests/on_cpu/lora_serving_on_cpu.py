"""A trainer with PEFT's LoRA modules and a real vLLM that serves its adapter, in one process on a CPU."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.on_cpu.engine_on_cpu import PROMPTS, adapter_of, engine, keep_imports_frozen
from tests.starting.ranks import caught
from tests.tools import lora_states

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trainer(hf: str):
    """A transformers model with PEFT's adapter, and a function that makes an optimizer step."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(plain, LoraConfig(r=4, lora_alpha=10, target_modules=TARGETS))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    tokens = torch.tensor(PROMPTS[1])[None]

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    return model, step


def answers(llm, adapters) -> list:
    """Four greedy tokens of every prompt, with their logprobs; each prompt with its adapter, or all with one."""
    from vllm import SamplingParams

    # not logprobs of prompts: with adapters the build for the CPU fails at those
    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [
        one.outputs[0] for one in llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
    ]
    return [
        [list(one.token_ids), [next(iter(step.values())).logprob for step in one.logprobs]] for one in outputs
    ]


def distance(model, answered: list) -> float:
    """The largest difference between the logprobs of answers and those that the trainer's model has."""
    most = 0.0
    for prompt, (tokens, logprobs) in zip(PROMPTS, answered, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(prompt + tokens)[None]).logits[0].log_softmax(-1)
        own = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        most = max(most, float((own - torch.tensor(logprobs)).abs().max()))
    return most


def running_request(llm, link, step, policy) -> dict:
    """The logprobs of a request that runs while two refits come; those of the same request with the version before,
    and with the one that came."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, detokenize=False)
    prompt, front = {"prompt_token_ids": PROMPTS[0]}, llm.llm_engine

    def logprobs(output) -> list[float]:
        return [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]

    def alone() -> list[float]:
        return logprobs(llm.generate([prompt], sampling, use_tqdm=False, lora_request=policy)[0])

    before = alone()
    front.add_request("running", prompt, sampling, lora_request=policy)
    outputs = front.step() + front.step()
    for _ in range(2):
        step()
        link.refit()
    while front.has_unfinished_requests():
        outputs += front.step()
    [running] = [logprobs(one) for one in outputs if one.finished]
    return {"before": before, "running": running, "after": alone()}


def serve_policy(hf: str, folder: str) -> dict:
    """What a vLLM that starts with dummy weights answers with the trainer's adapter after each of two refits;
    with what it loads itself of the files that PEFT saves then; with neither; and with both in one batch."""
    from vllm.lora.request import LoRARequest

    from reshard.engines.vllm.compat import plain_weights
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    keep_imports_frozen()
    model, step = trainer(hf)
    with plain_weights():
        llm = engine(hf, load_format="dummy", enable_lora=True, max_lora_rank=8, max_loras=3)
    destination = VllmModel.from_llm(llm)
    results: dict = {
        "plain": caught(partial(connect, RefitGroup.of_process_group(), FsdpModel(model), destination))
    }
    link = connect(RefitGroup.of_process_group(), FsdpModel(model), destination, adapter="policy")
    policy = LoRARequest("policy", 1, "no path")
    results["before"] = caught(partial(answers, llm, policy))
    results["served"], results["distances"] = [], []
    other = LoRARequest("other", 21, adapter_of(hf))
    for version in range(2):
        step()
        step()
        link.refit(verify=True)
        model.save_pretrained(Path(folder) / f"peft{version}")
        loaded = LoRARequest(f"loaded{version}", 11 + version, str(Path(folder) / f"peft{version}"))
        of_refit, of_files, of_base = (answers(llm, adapter) for adapter in (policy, loaded, None))
        llm.llm_engine.remove_lora(11 + version)
        alone = answers(llm, other)
        # Not one without an adapter among them: the build for the CPU serves those with the last slot's.
        mixed = answers(llm, [policy, other, policy])
        llm.llm_engine.remove_lora(other.lora_int_id)
        results["served"].append([of_refit, of_files, of_base, alone, mixed])
        results["distances"].append(distance(model, of_refit))
        with model.disable_adapter():
            results["distances"].append(distance(model, of_base))
    results["request"] = RefitExtension.reshard_adapter(SimpleNamespace(_reshard_connected=lambda: link))
    results["by version"] = answers(llm, LoRARequest(**results["request"]))
    results["stale"] = caught(partial(answers, llm, LoRARequest("policy@9", 1, "no path")))
    taken = LoRARequest("other", results["request"]["lora_int_id"], "no path")
    results["taken"] = caught(partial(answers, llm, taken))
    results["running"] = running_request(llm, link, step, policy)
    results["version"] = link.version
    destination.guard.lose("other weights, for a test")
    results["lost"] = caught(partial(answers, llm, policy))
    link.refit()
    results["mended"] = distance(model, answers(llm, policy))
    results["weights"] = link.below.link.refits
    results["other base"] = other_base(llm, hf, link, destination, model, policy)
    results["states"] = lora_states.refused(
        model,
        link,
        lambda another: connect(
            RefitGroup.of_process_group(), FsdpModel(another), destination, adapter="another"
        ),
    )
    results["closed"] = closed(llm, hf, link, destination, model, policy)
    return results


def other_base(llm, hf: str, link, destination, model, policy) -> dict:
    """What is said of the adapter when another link has brought another base, to a request that comes then and to
    one that runs; and how far the answers are from the trainer's model after the adapter's own refit."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    other = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    another = connect(RefitGroup.of_process_group(), FsdpModel(other), destination)
    front = llm.llm_engine
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    front.add_request("runs", {"prompt_token_ids": PROMPTS[0]}, sampling, lora_request=policy)
    front.step()
    another.refit(verify=True)
    said: dict = {"running": caught(front.step), "new": caught(partial(answers, llm, policy))}
    said["left"] = front.has_unfinished_requests()
    before = link.below.link.refits
    link.refit(verify=True)
    llm.reset_prefix_cache()
    said["distances"] = [distance(model, answers(llm, policy))]
    with model.disable_adapter():
        said["distances"].append(distance(model, answers(llm, None)))
    said["weights"] = [link.below.link.refits - before]
    link.refit(verify=True)
    said["weights"].append(link.below.link.refits - before)
    another.close()
    return said


def closed(llm, hf: str, link, destination, model, policy) -> dict:
    """Which of vLLM's slots are pinned; what is served after a close, also when other adapters have had all slots;
    what is said after the adapter was removed; and what is served after a connect that failed, and another."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from reshard.refit import RefitGroup, connect
    from reshard.trainers.fsdp import FsdpModel

    front, adapter = llm.llm_engine, destination.adapter("policy")
    manager = destination.module.lora_manager

    def again():
        return connect(RefitGroup.of_process_group(), FsdpModel(model), destination, adapter="policy")

    sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=0, detokenize=False)
    served, results = answers(llm, policy)[0][0], {"kept": front.remove_lora(adapter.request().lora_int_id)}
    front.add_request("last", {"prompt_token_ids": PROMPTS[0]}, sampling, lora_request=policy)
    front.step()
    link.close()
    results["pinned"] = len(manager._active_adapters.pinned_items)
    while front.has_unfinished_requests():
        outputs = front.step()
    others = [LoRARequest(f"other{index}", 31 + index, adapter_of(hf)) for index in range(3)]
    results["others"] = len({str(one[0]) for one in zip(answers(llm, others), strict=True)})
    results["done"] = [list(outputs[-1].outputs[0].token_ids), served, answers(llm, policy)[0][0]]
    results["removed"] = front.remove_lora(adapter.request().lora_int_id)
    results["then"] = caught(partial(answers, llm, policy))
    adapter.most_rank, most = 1, adapter.most_rank
    results["failed"] = caught(again)
    adapter.most_rank = most
    link = again()
    link.refit()
    results["again"] = distance(model, answers(llm, policy))
    return results
