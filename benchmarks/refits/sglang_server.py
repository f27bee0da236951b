"""A server of SGLang in a process group of its own, asked by HTTP: for `benchmarks.refits.sglang`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

LENGTHS = (9, 17, 33, 64)  # of the prompts, in tokens
ASKED = {
    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
}
KERNELS = {"attention_backend": "triton", "sampling_backend": "pytorch", "moe_runner_backend": "triton"}
SIZES = {"context_length": 512, "max_total_tokens": 4096, "max_running_requests": 8, "mem_fraction_static": 0.6,
         "cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 128}  # fmt: skip
# The fused reduction is compiled at the start, for minutes, and changes no weights.
SWITCHES = {"skip_tokenizer_init": True, "skip_server_warmup": True, "disable_shared_experts_fusion": True,
            "enforce_disable_flashinfer_allreduce_fusion": True}  # fmt: skip


class State(NamedTuple):
    """What a server says of each prompt (`Server.says`), and the digests of its weights by rank, if it tells them."""

    says: list
    digests: list | None


class Server:
    """SGLang's server, on this process's GPUs; its log is in `folder`."""

    def __init__(self, folder: Path, options: dict[str, Any], port: int) -> None:
        self.url, self.folder, self.options, self.port = f"http://127.0.0.1:{port}", folder, options, port
        self.process: subprocess.Popen | None = None
        # What torchrun sets would have SGLang's ranks look for a store of torchrun's.
        own = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        self.environment = {
            k: v for k, v in os.environ.items() if k not in own and not k.startswith("TORCHELASTIC")
        }

    def start(self, model: Path, load_format: str) -> None:
        """Start it with the config of `model`, and with its weights or, for ``"dummy"``, with random ones."""
        flags = []
        for name, value in ({"load_format": load_format} | KERNELS | SIZES | SWITCHES | self.options).items():
            flags += [f"--{name.replace('_', '-')}"] * (value is not False)
            flags += [] if isinstance(value, bool) else [str(value)]
        program = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]
        self.log, self.began = self.folder / f"server-{model.name}.log", time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*program, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        (self.folder / "server.pid").write_text(str(self.process.pid))
        signal.signal(signal.SIGTERM, lambda *_: (self.stop(), os._exit(1)))  # torchrun ends its processes

    def call(self, route: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> Any:
        """Return the answer of one of its routes."""
        from reshard.comm.http import call_route

        return call_route(self.url, route, body, timeout=timeout)

    def wait(self, limit: float) -> float:
        """Wait until it answers; return the seconds since its start."""
        while time.monotonic() < self.began + limit:
            if self.process is None or self.process.poll() is not None:
                break
            try:
                self.call("model_info", timeout=5.0)
                return time.monotonic() - self.began
            except Exception:
                time.sleep(0.3)
        raise RuntimeError(f"SGLang did not start:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        if self.process is None:
            return "it was not started"
        return self.log.read_text(errors="replace")[-6000:]

    def load(self, checkpoint: Path) -> None:
        """Let it load a checkpoint by its own loader, while it runs."""
        self.call("update_weights_from_disk", {"model_path": str(checkpoint), "load_format": "auto"})

    def flush_cache(self) -> None:
        """Let it forget the keys and values of earlier prompts. It refuses as long as it has traces of requests that
        it has answered, and a load would end it."""
        end = time.monotonic() + 10.0
        while True:
            try:
                return urlopen(f"{self.url}/flush_cache").close()  # which answers no JSON
            except HTTPError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def says(self, vocabulary: int) -> list:
        """Return the prompt logprobs, tokens and logprobs of each prompt, asked one after the other."""
        answers = []
        for number, length in enumerate(LENGTHS):
            prompt = [(7919 * i + 104729 * (number + 1)) % vocabulary for i in range(length)]
            meta = self.call("generate", {"input_ids": prompt, **ASKED})
            said = meta["meta_info"]
            answers.append([[one[:2] for one in said[f"{of}_token_logprobs"]] for of in ("input", "output")])
        return answers

    def digests(self) -> list | None:
        """Return what SGLang says of the bits of its weights, by rank; None if it says nothing."""
        try:
            ranks = self.call("weights_checker", {"action": "checksum"})["ranks"]
        except Exception as error:
            print("no digests:", str(error)[:300], flush=True)
            return None
        return [rank["checksums"] for rank in ranks]

    def state(self, vocabulary: int) -> State:
        """Return what it says, and the digests of its weights."""
        return State(self.says(vocabulary), self.digests())

    def stop(self) -> None:
        """End all of its processes."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(20)


def apart(one: list, other: list) -> dict[str, Any] | None:
    """Return how far two answers (`Server.says`) are apart, or None if they are equal to the last bit: how many
    logprobs of prompts differ, of how many; the largest difference, with its prompt and position; and how many of
    the greedy tokens differ."""
    if one == other:
        return None
    differ = [(abs(a[0] - b[0]), prompt, position)
              for prompt, (x, y) in enumerate(zip(one, other, strict=True))
              for position, (a, b) in enumerate(zip(x[0], y[0], strict=True)) if position]  # fmt: skip
    largest, prompt, position = max(differ)
    tokens = [a[1] != b[1] for x, y in zip(one, other, strict=True) for a, b in zip(x[1], y[1], strict=True)]
    return {
        "logprobs": [sum(value > 0 for value, *_ in differ), len(differ)],
        "largest": largest,
        "prompt": prompt,
        "position": position,
        "tokens": [sum(tokens), len(tokens)],
    }
