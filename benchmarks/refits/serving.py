"""Does a refitted vLLM give exactly the same answers as a freshly loaded one? After many refits, with CUDA
graphs, on real engines.

    torchrun --nproc-per-node 2 -m benchmarks.refits.serving refit --model qwen3-30b-a3b --layers 4 --folder DIR
    torchrun --nproc-per-node 2 -m benchmarks.refits.serving fresh --folder DIR
    torchrun --nproc-per-node 1 -m benchmarks.refits.serving sleep --folder DIR

`refit` starts vLLM with random weights and a Megatron model with Transformer Engine layers, changes
Megatron's weights and refits, 20 times, by both backends in turn, generating in between; then it writes the
weights as a Hugging Face checkpoint, gathered by broadcasts, and what vLLM generates and its prompt logprobs.
`fresh` starts vLLM from that checkpoint and compares, exactly. `sleep` asks an engine that has weights of no
meaning, or has lost them in its sleep, and refits it.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 20
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}


def prompts(vocabulary: int) -> list[dict]:
    generator = torch.Generator().manual_seed(7)
    return [
        {"prompt_token_ids": torch.randint(0, vocabulary, (n,), generator=generator).tolist()}
        for n in (7, 33, 64, 120, 200)
    ]


def spoken(llm, vocabulary: int) -> list:
    """Generated tokens, their logprobs and the prompts' logprobs."""
    from vllm import SamplingParams

    outputs = llm.generate(
        prompts(vocabulary),
        SamplingParams(temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    found = []
    for output in outputs:
        prompt = [
            entry[token].logprob
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        tokens = list(output.outputs[0].token_ids)
        found.append(
            [
                tokens,
                [
                    entry[token].logprob
                    for token, entry in zip(tokens, output.outputs[0].logprobs, strict=True)
                ],
                prompt,
            ]
        )
    return found


def refit(options) -> None:
    from benchmarks.models import change, config_of, megatron_models, vllm_engine
    from benchmarks.refits.refit import Today, used_bytes
    from reshard import MegatronLayout
    from reshard.engines.vllm.live import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    size, rank = dist.get_world_size(), dist.get_rank()
    config = config_of(options.model, options.layers)
    moe = config.get("num_experts") or config.get("n_routed_experts")
    if "n_routed_experts" in config:
        config |= {"n_routed_experts": 64, "n_group": 8}
    layout = MegatronLayout(tp=size, ep=size, etp=1) if moe else MegatronLayout(tp=size // 2, pp=2)
    llm = vllm_engine(options.folder / f"dummy{rank}", config, tensor_parallel_size=size, **GRAPHS)
    models = megatron_models(config, layout)
    source, destination = MegatronModel(models), VllmModel.from_llm(llm)
    links = [
        connect(RefitGroup.of_process_group(name), source, destination, backend=name)
        for name in ("cuda_ipc", "nccl")
    ]
    addresses = [tensor.data_ptr() for tensor in destination.tensors.values()]
    used = []
    for step in range(STEPS):
        change(source, step)
        links[step % 2].refit(version=step, verify=step % 5 == 0)
        llm.reset_prefix_cache()
        if step % 7 == 0:
            spoken(llm, config["vocab_size"])
        used.append(used_bytes())
    said = spoken(llm, config["vocab_size"])
    assert [tensor.data_ptr() for tensor in destination.tensors.values()] == addresses, "an address moved"
    growth = used[-1] - used[5]
    # A negative control: other weights must say something else.
    change(source, STEPS)
    links[0].refit(version=STEPS)
    llm.reset_prefix_cache()
    other = spoken(llm, config["vocab_size"])
    change(source, STEPS - 1)
    tensors: dict = {}
    today = Today(source, destination.model, destination.module)
    today.give = lambda full: tensors.update({name: value.cpu() for name, value in full.items()})
    today.run()
    if rank == 0:
        from safetensors.torch import save_file

        folder = options.folder / "hf"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        differs = sum(a != b for a, b in zip(said, other, strict=True))
        (options.folder / "said.json").write_text(
            json.dumps(
                {
                    "said": said,
                    "model": options.model,
                    "layout": str(layout),
                    "memory_growth_bytes": growth,
                    "prompts_that_differ_with_other_weights": differs,
                    "config": config,
                }
            ),
            encoding="utf-8",
        )


def fresh(options) -> None:
    from benchmarks.models import vllm_engine

    before = json.loads((options.folder / "said.json").read_text(encoding="utf-8"))
    llm = vllm_engine(
        options.folder / "hf",
        before["config"],
        tensor_parallel_size=dist.get_world_size(),
        load_format="safetensors",
        **GRAPHS,
    )
    said = spoken(llm, before["config"]["vocab_size"])
    differences = [
        abs(a - b)
        for x, y in zip(said, before["said"], strict=True)
        for k in (1, 2)
        for a, b in zip(x[k], y[k], strict=True)
    ]
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "model": before["model"],
                    "layers": before["config"]["num_hidden_layers"],
                    "megatron": before["layout"],
                    "vllm": f"TP{dist.get_world_size()}",
                    "refits": STEPS,
                    "same_tokens": all(x[0] == y[0] for x, y in zip(said, before["said"], strict=True)),
                    "logprobs": len(differences),
                    "largest_difference": max(differences),
                    "memory_growth_bytes": before["memory_growth_bytes"],
                    "prompts_that_differ_with_other_weights": before[
                        "prompts_that_differ_with_other_weights"
                    ],
                    "prompts": len(said),
                    "logprob_mean": sum(v for x in said for v in x[2]) / sum(len(x[2]) for x in said),
                }
            ),
            flush=True,
        )


def sleep(options) -> None:
    """What an engine answers that has no weights worth the name, and after each refit."""
    from benchmarks.models import change, config_of, megatron_models, vllm_engine
    from reshard import MegatronLayout, ReshardError
    from reshard.engines.vllm.live import VllmModel
    from reshard.refit import RefitGroup, connect
    from reshard.trainers.megatron import MegatronModel

    config = config_of(options.model, options.layers)
    if "n_routed_experts" in config:
        config |= {"n_routed_experts": 64}
    llm = vllm_engine(options.folder / "dummy", config, tensor_parallel_size=1, enable_sleep_mode=True)
    source = MegatronModel(megatron_models(config, MegatronLayout()))
    link = connect(RefitGroup.of_process_group(), source, VllmModel.from_llm(llm))

    def refused() -> str:
        try:
            spoken(llm, config["vocab_size"])
        except ReshardError as error:
            return str(error)
        return "it served"

    change(source, 0)
    found: dict = {"started with load_format=dummy": refused()}
    link.refit()
    said = spoken(llm, config["vocab_size"])
    for level in (1, 2):
        llm.sleep(level=level)
        try:
            link.refit()
        except ReshardError as error:
            found[f"refitted while it slept, level {level}"] = str(error)
        llm.wake_up()
        llm.reset_prefix_cache()
        woken = refused()
        if level == 1:
            woken = woken + ", the same as before" * (spoken(llm, config["vocab_size"]) == said)
        found[f"woken from level {level}"] = woken
        link.refit()
        llm.reset_prefix_cache()
        found[f"refitted after level {level}, says the same"] = spoken(llm, config["vocab_size"]) == said
        # Other weights, by the first refit after a sleep and by a later one: whatever the sleep
        # leaves behind differs.
        llm.sleep(level=level)
        llm.wake_up()
        change(source, level)
        link.refit()
        llm.reset_prefix_cache()
        first = spoken(llm, config["vocab_size"])
        link.refit()
        llm.reset_prefix_cache()
        second = spoken(llm, config["vocab_size"])
        found[f"other weights after level {level}, the same after one more refit"] = first == second
        found[f"other weights after level {level}, says something else than before"] = first != said
        said = second
    print(json.dumps(found, indent=1), flush=True)


def main() -> None:
    from benchmarks.processes import finish, start_processes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["refit", "fresh", "sleep"])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    start_processes()
    {"refit": refit, "fresh": fresh, "sleep": sleep}[options.what](options)
    finish()


if __name__ == "__main__":
    main()
