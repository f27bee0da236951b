"""A server of SGLang in a process group of its own, asked by HTTP: for `benchmarks.refits.sglang`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


class Server:
    """SGLang's server of a config with dummy weights, on this process's GPUs."""

    def __init__(self, folder: Path, options: dict[str, Any], port: int) -> None:
        self.url, self.log, self.began = f"http://127.0.0.1:{port}", folder / "server.log", time.monotonic()
        flags = []
        for name, value in ({"load_format": "dummy"} | KERNELS | SIZES | SWITCHES | options).items():
            flags += [f"--{name.replace('_', '-')}"] * (value is not False)
            flags += [] if isinstance(value, bool) else [str(value)]
        program = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), *flags]
        # What torchrun has set would have SGLang's ranks look for a store of torchrun's.
        own = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        environment = {
            k: v for k, v in os.environ.items() if k not in own and not k.startswith("TORCHELASTIC")
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*program, "--port", str(port)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        (folder / "server.pid").write_text(str(self.process.pid))
        signal.signal(signal.SIGTERM, lambda *_: (self.stop(), os._exit(1)))  # torchrun ends its processes

    def call(self, route: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> Any:
        """Return the answer of one of its routes."""
        from reshard.comm.http import call_route

        return call_route(self.url, route, body, timeout=timeout)

    def wait(self, limit: float) -> float:
        """Wait until it answers; return the seconds since its start."""
        while time.monotonic() < self.began + limit:
            if self.process.poll() is not None:
                break
            try:
                self.call("model_info", timeout=5.0)
                return time.monotonic() - self.began
            except Exception:
                time.sleep(0.3)
        raise RuntimeError(f"SGLang did not start:\n{self.tail()}")

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

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

    def state(self, vocabulary: int) -> tuple[list, list | None]:
        """Return what it says, and the digests of its weights."""
        return self.says(vocabulary), self.digests()

    def stop(self) -> None:
        """End all of its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(20)
