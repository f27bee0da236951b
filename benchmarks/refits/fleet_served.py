"""A fleet of real vLLM servers on GPUs, which answer requests all the while: sends, a server that joins, one that dies.

    python -m benchmarks.refits.fleet_served [--model qwen3-8b] [--layers N] [--sends 6] [--json FILE]

The trainer, a transformers model with random weights, has the first GPU; the servers, ``vllm serve`` by HTTP, share the
second, or all share what there is. Requests are sent to each without a pause, a few at a time. Reported:

- the seconds of sends with their parts, and the tokens a second that the servers said before them;
- of a server that joins while the others serve: the seconds from its addition until it serves, and what the others
  said meanwhile, as tokens a second and as a ratio to before;
- of a server that is killed between two sends, and of one that is killed within one: the seconds of that send, and of
  the next;
- of a trainer that starts again: the seconds until a server that was added before its first send serves.

After each part the digest of every server is compared with the trainer's, and with that of the version before, which
has to differ. No request may be answered by other tokens than the same request of another server at the same version.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import config_of
from reshard import digest
from reshard.comm.hosts import free_address
from reshard.comm.http import call_route
from reshard.core.errors import ReshardError
from reshard.integrations import Fleet, HttpClient
from reshard.trainers import FsdpModel

AT_ONCE, LENGTH = 8, 32  # requests to a server at a time, and tokens of an answer
PROMPT = list(range(5, 69))
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 1000}  # fmt: skip


class Server:
    """A ``vllm serve``, and a crowd that asks it."""

    def __init__(self, name: str, folder: Path, gpu: int | None, ends: ExitStack, python: str) -> None:
        self.name, self.url = name, f"http://{free_address('127.0.0.1')}"
        self.answered: list[tuple[float, int]] = []  # when, and how many tokens
        self.refused = 0
        self._stop = threading.Event()
        self._log = folder / f"{name}.log"
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--load-format", "dummy"]
        command += ["--weight-transfer-config", '{"backend": "reshard"}', "--served-model-name", "policy"]
        command += ["--port", self.url.rpartition(":")[2], "--skip-tokenizer-init", "--dtype", "bfloat16"]
        command += ["--enforce-eager", "--max-model-len", "1024", "--no-enable-prefix-caching"]
        command += ["--kv-cache-memory-bytes", str(1 << (31 if gpu is not None else 26))]
        command += ["--gpu-memory-utilization", "0.2"] if gpu is not None else []
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        variables |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        log = ends.enter_context(self._log.open("wb"))
        self.process = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
        )
        ends.callback(self.kill)
        self.client = HttpClient(self.url, name=name)

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            if self.process.poll() is not None:
                said = self._log.read_text(errors="replace").splitlines()
                why = [line for line in said if "Error" in line or "EngineCore" in line]
                sys.exit("\n".join([f"{self.name} ended:", *why[-60:]]))
            with suppress(ReshardError):
                call_route(self.url, "get_world_size", timeout=5)
                return
            time.sleep(0.5)

    def kill(self) -> None:
        """Kill it and its engine, as the loss of its host would."""
        self._stop.set()
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()

    def be_asked(self) -> None:
        """Ask it all the time, from now on."""
        for number in range(AT_ONCE):
            threading.Thread(target=self._ask, args=(number,), daemon=True).start()

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                tokens = self.says([number, *PROMPT], LENGTH)
                self.answered.append((time.monotonic(), len(tokens)))
            except (ReshardError, KeyError, IndexError):
                self.refused += 1
                time.sleep(0.2)

    def says(self, prompt: list[int], length: int) -> list[int]:
        """Return tokens that it says."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        return list(call_route(self.url, "v1/completions", body)["choices"][0]["token_ids"])


def rate(servers: list[Server], began: float, ended: float) -> float:
    """Return the tokens that servers said per second between two times."""
    said = sum(count for server in servers for when, count in [*server.answered] if began <= when <= ended)
    return said / (ended - began)


class Run:
    """The trainer, and its fleet."""

    def __init__(self, options: argparse.Namespace, folder: Path, ends: ExitStack) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options, self.folder, self.ends = options, folder, ends
        self.gpus = torch.cuda.device_count()
        config = config_of(options.model, options.layers) | {"initializer_range": 0.03}
        config |= {} if self.gpus else SMALL
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        made = AutoConfig.for_model(
            config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
        )
        torch.manual_seed(0)
        with torch.device("cuda:0" if self.gpus else "cpu"):
            model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).requires_grad_(False)
        model.config.architectures = config["architectures"]
        self.model, self.trainer = model, FsdpModel(model)
        self.servers: list[Server] = []  # of the fleet
        self.later: list[Server] = []  # that run, and join later
        self.digests: list[str] = []  # of all versions
        self.fleet = self.new_fleet()

    def new_fleet(self) -> Fleet:
        """Return a fleet of all servers."""
        options = {} if self.options.backend is None else {"backend": self.options.backend}
        fleet = Fleet(self.trainer, "127.0.0.1", **options)
        self.ends.callback(fleet.close)
        for server in self.servers:
            fleet.add(server.client)
        return fleet

    def start(self, *names: str) -> list[Server]:
        """Start servers."""
        gpu = self.gpus - 1 if self.gpus else None
        servers = [Server(name, self.folder, gpu, self.ends, self.options.python) for name in names]
        for server in servers:
            server.wait()
        return servers

    def step(self) -> None:
        """Change all weights."""
        for parameter in self.model.parameters():
            parameter.mul_(1.01 if parameter.ndim > 1 else 0.99)

    def send(self) -> dict[str, Any]:
        """Change the weights, and send them; return what that took."""
        self.step()
        began = time.monotonic()
        report = self.fleet.send(pausing=True)
        seconds = time.monotonic() - began
        return {"seconds": seconds, "behind": report.behind, "version": report.version} | {
            f"{part}_seconds": getattr(next(iter(report.reports.values())), f"{part}_seconds")
            for part in ("wait", "transfer", "total")
        }

    def check(self) -> dict[str, Any]:
        """Compare what all servers hold and say; return how many were compared."""
        own = digest(self.trainer, hf_config=self.folder).text
        for server in self.servers:
            held = digest(server.url).text
            if held != own or held in self.digests:
                raise ReshardError(
                    f"{server.name} holds {held}, the trainer {own}, and before {self.digests}"
                )
        return {"digest": own, "servers": len(self.servers)}

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> float:
        """Wait until something holds; return the seconds."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                raise ReshardError(f"it took more than {seconds} s: {self.fleet.describe()}")
            time.sleep(0.005)
        return time.monotonic() - began

    def measured(self) -> dict[str, Any]:
        """Go through all parts."""
        result: dict[str, Any] = {
            "model": self.options.model,
            "gpus": self.gpus,
            "layers": self.options.layers,
        }
        result["gpu"] = torch.cuda.get_device_name() if self.gpus else "none"
        result["bytes"] = sum(p.nbytes for p in self.model.parameters())
        first, second, *self.later = self.start(*(f"pod-{number}" for number in range(5)))
        self.servers = [first, second]
        for server in self.servers:
            self.fleet.add(server.client)
        result["first send"] = self.send() | self.check()
        for server in self.servers:
            server.be_asked()
        time.sleep(self.options.quiet)
        now = time.monotonic()
        result["tokens a second"] = rate(self.servers, now - self.options.quiet * 0.75, now)
        result["sends"] = self.sends()
        result["joins"] = self.joins()
        result["killed between"] = self.killed()
        result["killed within"] = self.killed_within()
        result["trainer again"] = self.again()
        return result

    def sends(self) -> dict[str, Any]:
        """Send several times."""
        self.digests.append(digest(self.trainer, hf_config=self.folder).text)
        rounds = [self.send() for _ in range(self.options.sends)]
        parts = ("seconds", "wait_seconds", "transfer_seconds", "total_seconds")
        return {part: statistics.median(one[part] for one in rounds) for part in parts} | self.check()

    def joins(self) -> dict[str, Any]:
        """Have a server join while the others are asked."""
        others = [*self.servers]
        newcomer = self.later.pop(0)
        waiting = self.options.quiet
        time.sleep(waiting)
        began = time.monotonic()
        before = rate(others, began - waiting, began)
        self.fleet.add(newcomer.client)
        took = self.until(lambda: self.fleet.describe()["engines"]["pod-2"]["version"] is not None)
        # Answers come by the batch: what is said is counted over a time that has several.
        time.sleep(max(0.0, waiting - took))
        meanwhile = rate(others, began, time.monotonic())
        self.servers.append(newcomer)
        found = self.check()
        newcomer.be_asked()
        return {"seconds": took, "before": before, "meanwhile": meanwhile, "counted_seconds": max(waiting, took),
                "ratio": meanwhile / before} | found  # fmt: skip

    def killed(self) -> dict[str, Any]:
        """Kill a server between two sends."""
        self.digests.append(digest(self.trainer, hf_config=self.folder).text)
        self.servers.pop(0).kill()
        first = self.send()
        found = self.check()
        second = self.send()
        return {"send": first, "next send": second} | found | self.check()

    def killed_within(self) -> dict[str, Any]:
        """Kill a server within a send, once its transfer has begun."""
        self.digests.append(digest(self.trainer, hf_config=self.folder).text)
        newcomer = self.later.pop(0)
        self.fleet.add(newcomer.client)
        self.until(lambda: self.fleet.describe()["engines"]["pod-3"]["version"] is not None)
        connects = self.send()
        self.digests.append(digest(self.trainer, hf_config=self.folder).text)
        quick = self.send()
        self.digests.append(digest(self.trainer, hf_config=self.folder).text)
        delay = quick["seconds"] - quick["transfer_seconds"] * 0.5 if self.gpus else quick["seconds"] * 0.5
        timer = threading.Timer(max(0.001, delay * 0.6), newcomer.kill)
        timer.start()
        first = self.send()
        found = self.check()
        second = self.send()
        return (
            {"connects": connects, "undisturbed": quick, "killed": first, "next send": second}
            | found
            | self.check()
        )

    def again(self) -> dict[str, Any]:
        """Start the trainer's fleet anew, and add a server before its first send."""
        version = self.fleet.version
        self.fleet.close()
        newcomer = self.later.pop(0)
        began = time.monotonic()
        self.fleet = self.new_fleet()
        self.fleet.add(newcomer.client)
        self.until(lambda: self.fleet.describe()["engines"]["pod-4"]["version"] is not None)
        took = time.monotonic() - began
        self.servers.append(newcomer)
        found = self.check()
        self.digests.append(found["digest"])
        described = self.fleet.describe()
        first = self.send()
        return {
            "seconds": took,
            "before": version,
            "found": described["found"],
            "first send": first,
        } | self.check()


def main() -> None:
    """Run all parts, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sends", type=int, default=6)
    parser.add_argument("--quiet", type=float, default=4.0, help="seconds over which tokens are counted")
    parser.add_argument("--backend")
    parser.add_argument("--python", default=sys.executable, help="the servers'")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        run = Run(options, folder, ends)
        result = run.measured() | {"refused": {server.name: server.refused for server in run.servers}}
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
