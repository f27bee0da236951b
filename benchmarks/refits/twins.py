"""An engine that serves quantized weights, and hands them on as they are to another vLLM.

    python -m benchmarks.refits.twins [--device cuda] [--model qwen3-8b] [--layers N] [--serve fp8_blocks int4 ...]
        [--times 3] [--json FILE]

For each way to serve, three processes: a trainer of a transformers model, an engine that it refits on the same GPU, and
a newcomer, on the next GPU if there is one, that starts with dummy weights and gets those of the engine
(`reshard.engines.workers.lending`), several times, at last while the engine generates. Random weights, in published
shapes; on a CPU a small model.

Compared are the bits of every tensor that vLLM reaches from its model, and the tokens, their logprobs and the prompts'
logprobs, exactly; and the same of both engines after another refit of both. Controls: before that the newcomer holds
other bits and refuses to serve, a bit that is changed when all has arrived is found, and other weights say something
else. Reported are the seconds from the first call to the newcomer's being ready, of these the transfer of bytes, and
that as a ratio to a plain copy of as many bytes; and the tokens a second of the engine that hands on, alone and
meanwhile.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import config_of, vllm_engine
from benchmarks.refits.lending import meet
from benchmarks.refits.serving import GRAPHS, prompts, spoken
from reshard.comm.hosts import free_address
from reshard.core.errors import ReshardError
from reshard.refit import RefitGroup, connect
from reshard.refit.twins import handed_on_by
from tests.tools.lender import Lender
from tests.tools.reachable import reachable

SECRET = "between the engines"
TRAINER, LENDER, NEWCOMER = range(3)
VERSION = 3


def compressed(weights: dict, inputs: dict | None) -> dict:
    """Return vLLM's options for what a checkpoint by compressed-tensors has of linear layers."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if inputs is None else "float-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
    return {"hf_overrides": {"quantization_config": config}}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
    "strategy": "group",
    "group_size": 128,
}
IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WAYS = {
    "fp8_blocks": {"hf_overrides": {"quantization_config": IN_BLOCKS}},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_channels": compressed(
        FP8 | {"strategy": "channel"},
        {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"},
    ),
    "int4": compressed(INT4, None),
    "mxfp8": {"quantization": "mxfp8"},
    "int8_experts": {"quantization": "int8_per_channel_weight_only"},
    "bf16": {},
}


def main() -> None:
    """Start the processes of each way, and print what was measured; end with 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--serve", nargs="+", choices=[*WAYS], default=["fp8_blocks", "fp8_channels", "int4"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--python", default=sys.executable, help="the engines'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    results: dict[str, Any] = {}
    for way in options.serve:
        began = time.monotonic()
        results[way] = of_way(way, options) | {"all of it, s": round(time.monotonic() - began, 1)}
        print(json.dumps({way: results[way]}, indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results) + "\n")
    sys.exit(any("failed" in result for result in results.values()))


def of_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the processes of one way report, or why one of them failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address = free_address("127.0.0.1")  # of all
        arguments = [*sys.argv[1:], "--way", way, "--folder", name, "--address", address]
        processes = [
            subprocess.Popen(
                [options.python if rank else sys.executable, "-m", "benchmarks.refits.twins", *arguments]
                + ["--rank", str(rank)]
            )
            for rank in (TRAINER, LENDER, NEWCOMER)
        ]
        while any(process.poll() is None for process in processes) and not [*folder.glob("*.error")]:
            time.sleep(0.2)
        if errors := sorted(folder.glob("*.error")):
            for process in processes:
                process.kill()
            return {"failed": errors[0].read_text()[-3000:]}
        if any(process.wait() for process in processes):
            return {"failed": f"processes ended with {[process.wait() for process in processes]}"}
        merged: dict[str, Any] = {}
        for rank in (LENDER, NEWCOMER):
            merged |= json.loads((folder / f"{rank}.json").read_text())
        return merged


def run_rank(options: argparse.Namespace) -> None:
    """Run this process's side, and write what it reports, or its error."""
    try:
        result = train(options) if options.rank == TRAINER else serve(options)
        (options.folder / f"{options.rank}.json").write_text(json.dumps(result))
    except BaseException:
        (options.folder / f"{options.rank}.part").write_text(traceback.format_exc())
        (options.folder / f"{options.rank}.part").rename(options.folder / f"{options.rank}.error")
        raise


def config_for(options: argparse.Namespace) -> dict:
    """Return the config of the model."""
    config = config_of(options.model, options.layers)
    if options.device == "cpu":
        config |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 64, "num_hidden_layers": options.layers or 4, "vocab_size": 1000}  # fmt: skip
        config |= {"num_experts": 8, "moe_intermediate_size": 64} if "num_experts" in config else {}
    return config


def joined(address: str, rank: int, size: int) -> RefitGroup:
    """Return the group of so many members that meets at an address."""
    return RefitGroup.join(address, rank, size, timeout=400, secret=SECRET)


def next_address(group: RefitGroup) -> str:
    """Return an address for all that is free now, as the trainer finds it."""
    own = free_address("127.0.0.1") if group.rank == TRAINER else ""
    group.begin("the next address")
    answers = group.gather("address", own.encode())
    group.commit()
    return answers[TRAINER].decode()


def gpu_of(rank: int) -> int:
    """Return the number of the GPU of a rank: the newcomer has another one, if there is one."""
    return int(rank == NEWCOMER and torch.cuda.device_count() > 1)


def train(options: argparse.Namespace) -> dict:
    """Refit the engine; take part in bringing up the newcomer, without weights; then refit both with other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from reshard.trainers import FsdpModel

    config = config_for(options) | {"initializer_range": 0.03}
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).requires_grad_(False)
    model.config.architectures = config["architectures"]
    group = joined(options.address, TRAINER, 3)
    link = connect(joined(next_address(group), TRAINER, 2), FsdpModel(model), None)
    link.refit(VERSION, verify=True)
    meet(group, "the engine is refitted")
    link.close()
    for turn in range(options.times + 2):
        members = joined(next_address(group), TRAINER, 3)
        try:
            without_weights = connect(members, None, None, backend=options.backend)
            without_weights.refit(VERSION, verify=True)
        except ReshardError:
            if turn <= options.times:  # the last one is spoiled
                raise
        meet(group, "an end")
        members.close()
    compared(group, None)
    for parameter in model.parameters():
        parameter.mul_(1.25 if parameter.ndim > 1 else 0.75)
    link = connect(joined(next_address(group), TRAINER, 3), FsdpModel(model), None)
    link.refit(VERSION + 1, verify=True)
    compared(group, None)
    return {}


def serve(options: argparse.Namespace) -> dict:
    """Run an engine's side."""
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK=str(gpu_of(options.rank)), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_address("127.0.0.1").rpartition(":")[2],
    )  # fmt: skip
    from reshard.engines.vllm.live import VllmModel

    config = config_for(options)
    settings: dict[str, Any] = dict(GRAPHS) if options.device == "cuda" else {}
    if options.device == "cuda":
        settings["gpu_memory_utilization"] = 0.3
    llm = vllm_engine(options.folder / f"model {options.rank}", config, **settings | WAYS[options.way])
    side = Side(options, llm, VllmModel.from_llm(llm), config["vocab_size"])
    side.group = joined(options.address, options.rank, 3)
    return side.lend() if options.rank == LENDER else side.bring_up()


class Side:
    """An engine, and what it says."""

    group: RefitGroup
    asked = 0  # how often `tokens_while` has asked

    def __init__(self, options: argparse.Namespace, llm: Any, engine: Any, vocabulary: int) -> None:
        self.options, self.llm, self.engine, self.vocabulary = options, llm, engine, vocabulary

    def look(self) -> dict[str, Any]:
        """Return what the engine says, whether it says the same again, as it does not with some of vLLM's kernels, and
        the bits of all that its model reaches."""
        held, answers = reachable(self.engine.module), []
        for _ in range(2):
            self.llm.reset_prefix_cache()
            answers.append(spoken(self.llm, self.vocabulary))
        return {
            "said": answers[0],
            "repeats": answers[0] == answers[1],
            "held": {name: bits for name, bits in held.items() if ".kv_cache" not in name},
        }

    def lend(self) -> dict[str, Any]:
        """Be refitted, and hand that on; return how long the first took, and how many tensors were compared."""
        options, engine = self.options, self.engine
        link = connect(joined(next_address(self.group), 1, 2), None, engine)
        link.refit(VERSION, verify=True)
        meet(self.group, "the engine is refitted")
        link.close()
        worker, said = Lender(engine), self.look()
        alone, meanwhile = self.tokens_while(lambda: True, 1.0), []
        for turn in range(options.times + 2):
            address = next_address(self.group)
            worker.reshard_lend(
                address, LENDER, 3, VERSION, timeout=400.0, secret=SECRET, backend=options.backend
            )
            thread = worker._reshard_lending._thread
            if turn and turn < options.times:
                meanwhile.append(self.tokens_while(thread.is_alive))
            while turn == options.times and thread.is_alive():
                self.llm.reset_prefix_cache()
                if spoken(self.llm, self.vocabulary) != said["said"] and said["repeats"]:
                    raise ReshardError("the engine says something else while it hands on its weights")
            thread.join()
            meet(self.group, "an end")
        differing = compared(self.group, said)
        link = connect(joined(next_address(self.group), 1, 3), None, engine)
        link.refit(VERSION + 1, verify=True)
        other = self.look()
        both = compared(self.group, other)
        if other["said"] == said["said"]:
            raise ReshardError("other weights say the same")
        return {
            "served": engine.quantized_layers(),
            "tokens a second, alone": alone,
            "meanwhile": statistics.median(meanwhile) if meanwhile else None,
            "says the same again": said["repeats"],
            "tensors compared": len(said["held"]),
            "logprobs compared": said["repeats"]
            * sum(len(part) for prompt in said["said"] for part in prompt[1:]),
            "tensors that differ": differing,
            "tensors that differ after the next refit": both,
        }

    def tokens_while(self, goes_on: Callable[[], bool], seconds: float = math.inf) -> float:
        """Return the tokens a second that the engine says while something goes on, or for so many seconds, answering
        8 requests at a time."""
        from vllm import SamplingParams

        own, limit = (
            self.llm.llm_engine,
            SamplingParams(temperature=0, max_tokens=1 << 10, ignore_eos=True, detokenize=False),
        )
        self.asked += 1
        names = [f"{self.asked} {number}" for number in range(8)]
        for number, name in enumerate(names):
            own.add_request(name, {"prompt_token_ids": [number, *range(5, 37)]}, limit)
        own.step()  # the prompts
        began, steps = time.monotonic(), 0
        while goes_on() and time.monotonic() - began < seconds:
            own.step()
            steps += 1
        took = time.monotonic() - began
        own.abort_request(names)
        while own.has_unfinished_requests():
            own.step()
        return steps * len(names) / took

    def bring_up(self) -> dict[str, Any]:
        """Get the weights, several times; return the seconds."""
        options, engine = self.options, self.engine
        next_address(self.group)  # of the trainer and the other engine
        meet(self.group, "the engine is refitted")
        refused, before = refusal_of(self.llm, self.vocabulary), reachable(engine.module)
        seconds, transfers, routes = [], [], []
        for turn in range(options.times + 1):
            if turn:
                for region in handed_on_by(engine).memory:
                    region.tensor.zero_()
            took, transfer, routes = self.take(next_address(self.group))
            meet(self.group, "an end")
            seconds.append(took)
            transfers.append(transfer)
        got = self.look()
        spoiled = self.spoil()
        if "did not arrive as they are" not in spoiled or engine.ready:
            raise ReshardError(f"a spoiled bit was not found: {spoiled}")
        if not [name for name, bits in got["held"].items() if before.get(name) != bits]:
            raise ReshardError("the newcomer held the same before")
        compared(self.group, got)
        link = connect(joined(next_address(self.group), 2, 3), None, engine)
        link.refit(VERSION + 1, verify=True)
        compared(self.group, self.look())
        size = sum(part.tensor.nbytes for part in handed_on_by(engine).memory)
        quiet = slice(1, -1) if options.times > 1 else slice(0, 1)
        transfer, floor = (
            statistics.median(transfers[quiet]),
            copied(size) if options.device == "cuda" else None,
        )
        return {
            "before it was brought up": refused,
            "spoiled": spoiled,
            "bytes": size,
            "seconds": statistics.median(seconds[quiet]),
            "first": seconds[0],
            "while the engine generates": seconds[-1],
            "transfer": transfer,
            "copy": floor,
            "ratio": transfer / floor if floor else None,
            "routes": routes,
        }

    def take(self, address: str) -> tuple[float, float, Any]:
        """Get the weights once; return the seconds, those of the transfer, and the routes."""
        began = time.monotonic()
        members = joined(address, NEWCOMER, 3)
        try:
            link = connect(members, None, self.engine, backend=self.options.backend)
            try:
                report = link.refit(VERSION, verify=True)
                return time.monotonic() - began, report.transfer_seconds, link.describe()["routes"]
            finally:
                link.close()
        finally:
            members.close()

    def spoil(self) -> str:
        """Return what is said where a bit is changed when all has arrived."""
        engine = self.engine
        [name, *_] = [*engine.blocks, *engine.reloads.round_of, "model.norm"]
        parameter = next(engine.module.get_submodule(name).parameters())
        restore = engine.restore_left_alone

        def spoil() -> None:
            restore()
            parameter.data.as_strided((1,), (1,)).view(torch.uint8)[0] ^= 1

        engine.restore_left_alone = spoil
        address = next_address(self.group)
        said = raised(lambda: self.take(address))
        engine.restore_left_alone = restore
        meet(self.group, "an end")
        return said


def refusal_of(llm: Any, vocabulary: int) -> str:
    """Return how a vLLM refuses requests: by the sentence of an error, or answers without tokens that say why they
    have ended. Raises ReshardError if it serves."""
    from vllm import SamplingParams

    try:
        outputs = llm.generate(
            prompts(vocabulary), SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )
    except ReshardError as error:
        return str(error)
    if any(output.outputs[0].token_ids for output in outputs):
        raise ReshardError("an engine with dummy weights serves")
    return f"no tokens, {outputs[0].outputs[0].finish_reason}"


def raised(action: Callable[[], Any]) -> str:
    """Return the sentence of the ReshardError that an action raises."""
    try:
        action()
    except ReshardError as error:
        return str(error)
    return "no error"


def compared(group: RefitGroup, seen: dict[str, Any] | None) -> list[str]:
    """Compare what both engines say, which has to be the same, and what they hold; return the names of tensors that
    differ, which no weights are of. Raises ReshardError where a parameter or a buffer does."""
    group.begin("what is seen")
    answers = group.gather("seen", json.dumps(seen).encode())
    group.commit()
    one, other = (json.loads(answers[rank]) for rank in (LENDER, NEWCOMER))
    differing = sorted(
        name for name in {**one["held"], **other["held"]} if one["held"].get(name) != other["held"].get(name)
    )
    if one["said"] != other["said"] and one["repeats"] and other["repeats"]:
        raise ReshardError(
            f"the engines say different things; {len(differing)} tensors differ: {differing[:5]}"
        )
    own = [name for name in differing if "._parameters." in name or "._buffers." in name]
    if own := [name for name in own if not name.endswith(("k_scale", "v_scale", "q_scale", "prob_scale"))]:
        raise ReshardError(f"{len(own)} tensors differ: {own[:5]}")
    return differing


def copied(size: int) -> float:
    """Return the seconds of a plain copy of so many bytes from the other engine's GPU to this one's, the least of
    five."""
    source, target = (
        torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu_of(rank)}") for rank in (LENDER, NEWCOMER)
    )
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        seconds.append(time.monotonic() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
