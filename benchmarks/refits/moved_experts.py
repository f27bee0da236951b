"""A ``vllm serve`` that copies experts and moves them by their load (EPLB), refitted between its moves.

    python -m benchmarks.refits.moved_experts [--model qwen3-30b-a3b] [--layers 4] [--redundant 32] [--in-background]
        [--eager] [--moves 3] [--gpus 0 1] [--json FILE]

Two GPUs: vLLM has its experts, and copies of some, on both (TP2, EP2), a trainer in this process the whole model on the
first; random weights in published shapes. Requests make vLLM move experts, with ``--in-background`` in a thread of its
own, while each refit comes too. Each time all ranks' places of experts are held, bit for bit, against the trainer's
tensors, by vLLM's own table of where experts are, and all weights by their digest; and by the table before the moves,
which must differ.

Reported: seconds of connect, of a refit that plans anew since experts have moved, and of the next, which does not.

``--device cpu`` rehearses it with a small model on one rank of vLLM's build for the CPU, which has no EPLB: nothing
moves.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.models import config_of
from benchmarks.refits.switching import train
from reshard import digest
from reshard.comm.fronts import Server
from reshard.comm.hosts import free_address
from reshard.engines.digest import digest_of_engine
from reshard.engines.vllm.worker import RefitExtension
from reshard.refit import RefitGroup, connect
from reshard.trainers import FsdpModel

START_SECONDS, MOVE_SECONDS = 900, 300
TRAINER = 1  # members before the engine's
STEPS = 32  # of vLLM's, after which it moves experts


class Extension(RefitExtension):
    """A worker that tells what it has in its places."""

    def places(self) -> dict[str, Any]:
        """Return, of each layer with experts, the sha256 of each place's matrices, by the layer's number, the first of
        this rank's places among all, and vLLM's own table of the experts in all of them; whether it moves some now."""
        state = getattr(self.model_runner, "eplb_state", None)  # type: ignore[attr-defined]
        moves = next(iter(state.model_states.values()), None) if state is not None else None
        found: dict[int, list[list[str]]] = {}
        first = 0
        for name, module in self.get_model().named_modules():  # type: ignore[attr-defined]
            if not name.endswith(".experts.routed_experts"):
                continue
            layer = int(name.split("layers.")[1].split(".")[0])
            found[layer] = [
                [_sha256(matrix) for matrix in (module.w13_weight[place], module.w2_weight[place])]
                for place in range(len(module.w13_weight))
            ]
            if (own := module.expert_map_manager.expert_map) is not None:
                first = int((own >= 0).nonzero()[0])
        table = moves.physical_to_logical_map.tolist() if moves is not None else None
        return {
            "layers": [[layer, of_layer] for layer, of_layer in found.items()],
            "first": first,
            "table": table,
            "moving": moves is not None and bool(moves.rebalanced),
        }


def _sha256(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy()).hexdigest()


def main() -> None:
    """Run both sides, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--redundant", type=int, default=32)
    parser.add_argument("--in-background", action="store_true")
    parser.add_argument("--moves", type=int, default=3)
    parser.add_argument("--gpus", nargs=2, default=["0", "1"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--share", type=float, default=0.3, help="of a GPU's memory, for vLLM")
    parser.add_argument("--eager", action="store_true", help="vLLM without graphs, which starts sooner")
    parser.add_argument("--python", default=sys.executable, help="vLLM's")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(options)
        model.config.save_pretrained(folder)
        with served(Path(folder), options) as url:
            result = measure(url, model, options)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """Return the trainer's model, on the first of the GPUs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(options.model, options.layers)
    if options.device == "cpu":
        config |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # fmt: skip
    config |= {"initializer_range": 0.02}
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    where = f"cuda:{options.gpus[0]}" if options.device == "cuda" else "cpu"
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.config.architectures = config["architectures"]
    return model.requires_grad_(False)


@contextmanager
def served(directory: Path, options: argparse.Namespace) -> Iterator[str]:
    """Yield the address of a ``vllm serve``, and end it."""
    address = free_address("127.0.0.1")
    host, _, port = address.rpartition(":")
    command = [
        options.python, "-m", "vllm.entrypoints.cli.main", "serve", str(directory), "--load-format", "dummy",
        "--skip-tokenizer-init", "--max-model-len", "1024",
        "--worker-extension-cls", "benchmarks.refits.moved_experts.Extension", "--host", host, "--port", port,
    ]  # fmt: skip
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if options.device == "cuda":
        balancing = {
            "num_redundant_experts": options.redundant,
            "step_interval": STEPS,
            "window_size": STEPS // 2,
            "use_async": options.in_background,
        }
        command += ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
        command += ["--enable-eplb", "--eplb-config", json.dumps(balancing)]
        command += ["--gpu-memory-utilization", str(options.share), "--moe-backend", "triton"]
        command += ["--enforce-eager"] * options.eager
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(options.gpus)
    else:
        from tests.install_vllm_cpu import environment_of_engine

        environment = (
            environment_of_engine() | environment | {"PYTHONPATH": environment_of_engine()["PYTHONPATH"]}
        )
        command += ["--enforce-eager", "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 26)]
    with (
        options.log.open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as server,
    ):
        try:
            wait_for(address, server, options.log)
            yield f"http://{address}"
        finally:
            family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
            server.terminate()
            psutil.wait_procs(family, timeout=30)
            for process in family:
                if process.is_running():
                    process.kill()


def wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    """Wait until a server has started. Raises RuntimeError, with the end of its log, if it ends or is late."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(
        f"vllm serve did not start: {log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
    )


class Sides:
    """The trainer of this process, and a server that is called beside it."""

    def __init__(self, url: str, model: torch.nn.Module, backend: str, ranks: int) -> None:
        self.url, self.model, self.server = url, model, Server(url)
        self.beside = ThreadPoolExecutor(1)
        address = free_address("127.0.0.1")
        size = TRAINER + ranks
        called = self.beside.submit(self.server.send, ("reshard_connect", (address, TRAINER, size, backend)))
        self.source = FsdpModel(model)
        self.link = connect(RefitGroup.join(address, 0, size, timeout=300), self.source, backend=backend)
        called.result()

    def refit(self, version: int) -> float:
        """Refit, with a verification; return the seconds."""
        began = time.perf_counter()
        called = self.beside.submit(self.server.send, ("reshard_refit", (version, True)))
        self.link.refit(version, verify=True)
        called.result()
        return time.perf_counter() - began

    def places(self) -> list[dict[str, Any]]:
        """Return what workers have in their places."""
        answers: list[dict[str, Any]] = self.server.send(("places", ()))
        return answers

    def ask(self, seed: int, tokens: int) -> None:
        """Have vLLM make so many tokens, one a step, after a prompt that its routers send to few experts."""
        prompt = [[100 + (seed * 7919 + number) % 900] * 64 for number in range(8)]
        body = {"model": self.server_model(), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "detokenize": False}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=MOVE_SECONDS).close()

    def server_model(self) -> str:
        """Return the name by which the server knows its model."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            name: str = json.loads(answer.read())["data"][0]["id"]
        return name

    def wrong(self, answers: list[dict[str, Any]], table: list[list[int]] | None) -> int:
        """Return how many places do not hold, bit for bit, the trainer's expert that a table says."""
        layers = self.model.model.layers
        wrong = 0
        for answer in answers:
            for number, (layer, places) in enumerate(answer["layers"]):
                experts = layers[layer].mlp.experts
                for place, found in enumerate(places):
                    place += answer["first"]
                    expert = place if table is None else table[number][place]
                    expected = [_sha256(experts.gate_up_proj[expert]), _sha256(experts.down_proj[expert])]
                    wrong += found != expected
        return wrong


def measure(url: str, model: torch.nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """Refit between moves, and check all places each time."""
    began = time.perf_counter()
    sides = Sides(url, model, options.backend, 2 if options.device == "cuda" else 1)
    result: dict[str, Any] = {"connect, s": time.perf_counter() - began, "moves": []}
    result["first refit, s"] = sides.refit(1)
    check(sides, model)
    version = 1
    for move in range(options.moves):
        before = sides.places()[0]["table"]
        moved, deadline = before is None, time.monotonic() + MOVE_SECONDS
        sides.ask(move, 8 if moved else STEPS)
        in_the_midst = options.in_background and move % 2 == 0
        while not moved and time.monotonic() < deadline:
            sides.ask(move, 1 if in_the_midst else STEPS // 4)
            now = sides.places()[0]
            moved = now["moving"] if in_the_midst else now["table"] != before
        if not moved:
            raise RuntimeError("vLLM has moved no experts")
        moving = sides.places()[0]["moving"]
        train(model, 0.5)
        version += 1
        seconds = sides.refit(version)
        answers = check(sides, model)
        control = sides.wrong(answers, before) if before is not None else None
        if before is not None and answers[0]["table"] != before and not control:
            raise RuntimeError("by the table of before no place is wrong")
        sides.ask(move, STEPS // 4)  # what was copied in the background is taken over now, or not
        check(sides, model)
        version += 1
        again = sides.refit(version)
        check(sides, model)
        result["moves"].append(
            {
                "while moving": moving,
                "refit, s": seconds,
                "the next, s": again,
                "wrong by the table before": control,
            }
        )
    sides.link.close()
    return result


def check(sides: Sides, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Check all places and the digest of all weights; return what workers have. Raises RuntimeError if one is wrong."""
    answers = sides.places()
    wrong = sides.wrong(answers, answers[0]["table"])
    if wrong:
        raise RuntimeError(f"{wrong} places hold something else than the trainer's expert")
    served, own = (
        digest_of_engine(sides.url, "bfloat16").text,
        digest(FsdpModel(model), hf_config=model.config, dtype="bfloat16").text,
    )
    if served != own:
        raise RuntimeError(f"vLLM serves weights with digest {served}, the trainer has {own}")
    return answers


if __name__ == "__main__":
    main()
