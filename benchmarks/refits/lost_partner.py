"""What happens to the other ranks when a partner is lost within an exchange of NCCL's buckets?

    python -m benchmarks.refits.lost_partner [--cases plain registered sockets ...] [--json FILE]

In each case a trainer (Megatron, a small model) has the first GPU and a vLLM the second, each in a process of its own.
After a verified refit one of them dies, or stops, where it should have begun its part of the next. Asked of
the one that is left: when does its refit end, and with what sentence; is its GPU done then; is a trainer that
comes next connected, with weights that a verification finds whole; and is the process alive `WATCHED` seconds
later, when torch's watchdog would have ended it? Cases run side by side; ``before-...`` ones without what
reshard does about it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 10.0  # seconds that the members wait for each other
WATCHED = 25.0
HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}


class Case(NamedTuple):
    """What is lost, and how the members are connected."""

    lost: str = "trainer"
    stops: bool = False  # it does not die
    keep_mapped: bool = False  # buckets stay, and are registered with NCCL
    quantization: str | None = None
    environment: dict[str, str] = {}
    as_before: bool = False
    abandons: bool = False  # registered buckets are left to a communicator that was aborted


CASES = {
    "plain": Case(),
    "registered": Case(keep_mapped=True),
    "registered, abandoned": Case(keep_mapped=True, abandons=True),
    "fp8": Case(quantization="fp8"),
    "sockets": Case(environment=HOSTS),
    "stops": Case(stops=True),
    "engine": Case(lost="engine"),
    "before-plain": Case(as_before=True),
    "before-sockets": Case(environment=HOSTS, as_before=True),
}


class Part:
    """One process of a case."""

    def __init__(self, name: str, role: str, port: int, folder: Path) -> None:
        self.name, self.case, self.role, self.port, self.folder = name, CASES[name], role, port, folder
        self.said: dict[str, Any] = {}

    def run(self) -> None:
        """Play the part; what is found is written as it comes."""
        from benchmarks.processes import start_processes
        from reshard.refit.transports import communicator
        from reshard.refit.transports.nccl import Nccl

        start_processes()
        if self.case.as_before:
            communicator._surviving_errors = nullcontext
            Nccl.abort = lambda self: None  # type: ignore[method-assign]
        if self.case.abandons:
            Nccl.abort = aborting_only  # type: ignore[method-assign]
        engine = self.engine() if self.role == "engine" else None
        source = self.trainer() if engine is None else None
        self.reach("built")
        if self.role == "next":
            self.wait_for("left")
        else:
            self.wait_for("built", "engine" if engine is None else "trainer")
            link = self.connect(0, source, engine)
            link.refit(verify=True)
            if self.role == self.case.lost:
                Nccl._run_whole = lambda *_: self.leave()  # type: ignore[method-assign,assignment]
            self.left_alone(link)
        if self.case.lost == "trainer":
            began = time.monotonic()
            link = self.connect(1, source, engine, 40.0)
            for _ in range(3):
                link.refit(verify=True)
            self.note("connected and refitted anew, s", time.monotonic() - began)
            free = self.free_mib()
            link.close()
            self.note("MiB that a close gives back", self.free_mib() - free)
        time.sleep(WATCHED)
        self.note("GPU is done at the end", self.is_done())
        self.note("alive at the end", True)

    def engine(self) -> Any:
        """A vLLM in this process."""
        from benchmarks.models import vllm_engine
        from reshard.engines.vllm.live import VllmModel

        options: dict[str, Any] = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.05}
        if self.case.quantization:
            options["quantization"] = self.case.quantization
        return VllmModel.from_llm(vllm_engine(self.folder / "config", self.config(), **options))

    def trainer(self) -> Any:
        """A Megatron in this process."""
        from benchmarks.models import change, megatron_models
        from reshard import MegatronLayout
        from reshard.trainers.megatron import MegatronModel

        source = MegatronModel(megatron_models(self.config(), MegatronLayout()))
        change(source, 0)
        return source

    def config(self) -> dict:
        """Return the config of the model, with heads that a GPU's kernels take."""
        from benchmarks.models import config_of

        return config_of("tiny-qwen3", None) | {"head_dim": 64}

    def connect(self, number: int, source: Any, engine: Any, limit: float = LIMIT) -> Any:
        """Connect the trainer and the engine, which meet at the engine's or, if that is to be lost, the trainer's."""
        from reshard.refit import RefitGroup, connect

        rank = int((self.role == "engine") == (self.case.lost == "engine"))
        group = RefitGroup.join(f"127.0.0.1:{self.port + number}", rank, 2, timeout=limit)
        return connect(group, source, engine, backend="nccl", keep_mapped=self.case.keep_mapped)

    def leave(self) -> None:
        """Be lost."""
        self.note("lost", True)
        if self.case.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(7)

    def left_alone(self, link: Any) -> None:
        """Refit with the partner that is lost meanwhile, and note what is left."""
        began = time.monotonic()
        try:
            link.refit()
        except Exception as error:
            self.note("refit ended, s", time.monotonic() - began)
            self.note("it said", f"{type(error).__name__}: {error}")
        self.note("GPU is done", self.is_done())
        link.close()
        self.reach("left")

    def is_done(self) -> bool:
        """Return whether the GPU has done all within five seconds."""
        import torch

        from benchmarks.processes import device
        from reshard.refit.copying.copies import wait_for_all_streams

        return wait_for_all_streams(torch.device(device()), 5.0)

    def free_mib(self) -> int:
        """Return how much of the GPU's memory is free, once torch has given back what it does not use."""
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] >> 20

    def note(self, what: str, value: Any) -> None:
        """Keep and print what was found."""
        self.said[what] = round(value, 2) if isinstance(value, float) else value
        print(f"{self.name}, {self.role}: {what}: {self.said[what]}", flush=True)
        (self.folder / f"{self.role}.json").write_text(json.dumps(self.said), encoding="utf-8")

    def reach(self, step: str) -> None:
        """Tell the others of this case that this part has come so far."""
        (self.folder / f"{step}-{self.role}").touch()

    def wait_for(self, step: str, role: str = "*") -> None:
        """Wait until another part has come so far."""
        deadline = time.monotonic() + 240
        while not any(self.folder.glob(f"{step}-{role}")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody has come to {step!r}")
            time.sleep(0.05)


def aborting_only(transport: Any) -> None:
    """Abort a transport's communicator, and leave it its memory."""
    transport.communicator.abort()
    transport._abandon()
    transport.communicator = transport.store = None


def start(name: str, role: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start a part of a case, which sees its GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    numbers = {"trainer": 1, "engine": 2, "next": 3}
    environment = CASES[name].environment | {
        "CUDA_VISIBLE_DEVICES": visible[int(role == "engine") % len(visible)],
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port + 10 + numbers[role]),
    }
    with open(folder / f"{role}.log", "wb") as log:
        command = [
            sys.executable,
            "-m",
            "benchmarks.refits.lost_partner",
            "--part",
            name,
            role,
            str(port),
            str(folder),
        ]
        return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, role, port, folder = options.part
        try:
            Part(name, role, int(port), Path(folder)).run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    with tempfile.TemporaryDirectory() as root:
        parts = {}
        for number, name in enumerate(options.cases):
            folder = Path(root) / name
            folder.mkdir()
            roles = ("engine", "trainer", "next") if CASES[name].lost == "trainer" else ("engine", "trainer")
            for role in roles:
                parts[name, role] = start(name, role, options.port + 20 * number, folder)
        result: dict[str, Any] = {}
        for (name, role), process in parts.items():
            if role != CASES[name].lost:
                code = process.wait()
                said = Path(root) / name / f"{role}.json"
                found = json.loads(said.read_text()) if said.exists() else {}
                log = (Path(root) / name / f"{role}.log").read_text(errors="replace")
                warned = "destroy_process_group() was not called" in log
                result[f"{name}, {role}"] = found | {
                    "torch warns of an open communicator": warned,
                    "exit": code,
                }
                print(
                    name,
                    role,
                    json.dumps(result[f"{name}, {role}"], indent=1),
                    log[-1500:] if code else "",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
        for process in parts.values():
            process.kill()


if __name__ == "__main__":
    main()
