"""A trainer and vLLM servers that come and go: the third joins while the trainer trains, the first is killed.

    python examples/refit_fleet.py [MODEL] [--steps 4]

MODEL is a directory with a config.json, or a hub id, of a model that transformers trains and vLLM serves; without it a
small one is made up. Weights are random. The trainer is plain transformers, which FSDP2's `fully_shard` may have
sharded; each server has the GPU of its number, and the trainer that of the number after. Without GPUs bytes travel
over Gloo, and vLLM's build for the CPU serves. An engine that joins between two steps has the weights from another
one before the next step ends.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reshard import read_model
from reshard.comm.hosts import free_address
from reshard.comm.http import call_route
from reshard.core.errors import ReshardError
from reshard.integrations import Fleet, HttpClient
from reshard.trainers import FsdpModel

SMALL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 128,
         "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
         "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
         "torch_dtype": "bfloat16"}  # fmt: skip
PROMPT = list(range(5, 25))


class Server:
    """A ``vllm serve``, as a pod would run it."""

    def __init__(self, name: str, folder: str, gpu: int, ends: ExitStack) -> None:
        self.name = name
        self.url = f"http://{free_address('127.0.0.1')}"
        # --8<-- [start:server]
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder),
            *("--load-format", "dummy", "--weight-transfer-config", '{"backend": "reshard"}'),
            *("--served-model-name", "policy", "--port", self.url.rpartition(":")[2]),
        ]
        # --8<-- [end:server]
        command += [
            "--enforce-eager",
            "--skip-tokenizer-init",
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "1024",
        ]
        if torch.cuda.is_available():
            command += ["--gpu-memory-utilization", "0.5"]
        else:
            command += ["--kv-cache-memory-bytes", str(1 << 26)]
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if not torch.cuda.is_available():
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        self.log = Path(folder) / f"{name}.log"
        log = ends.enter_context(self.log.open("wb"))
        self.process = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=log, start_new_session=True
        )
        ends.callback(self.kill)

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            if self.process.poll() is not None:
                *_, last = ["nothing", *self.log.read_text(errors="replace").split("\n")[:-1]]
                code = self.process.returncode
                sys.exit(f"{self.name} ended with exit code {code}; the last line of {self.log}: {last}")
            try:
                call_route(self.url, "get_world_size", timeout=5)
            except ReshardError:
                time.sleep(0.5)
            else:
                return

    def kill(self) -> None:
        """Kill it and its engine, as the loss of its host would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()

    def answer(self) -> list[int]:
        """Return a few tokens."""
        body = {
            "model": "policy",
            "prompt": PROMPT,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        return list(call_route(self.url, "v1/completions", body)["choices"][0]["token_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    config = dict(read_model(options.model).config) if options.model else SMALL
    gpus, folder = torch.cuda.device_count(), tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.to(f"cuda:{min(3, gpus - 1)}" if gpus else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with ExitStack() as ends:
        servers = [Server(f"pod-{index}", folder, index, ends) for index in range(2)]
        # --8<-- [start:fleet]
        fleet = Fleet(FsdpModel(model), "127.0.0.1")
        ends.callback(fleet.close)
        for server in servers:
            server.wait()
            fleet.add(HttpClient(server.url, name=server.name))
        # --8<-- [end:fleet]
        for step in range(options.steps):
            tokens = torch.randint(model.config.vocab_size, (4, 32), device=model.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # --8<-- [start:send]
            report = fleet.send(step, pausing=True)
            # --8<-- [end:send]
            print(f"step {step}:", *report.lines(), sep="\n  ", flush=True)
            if step == 0:
                newcomer = Server("pod-2", folder, 2, ends)
                servers.append(newcomer)
                newcomer.wait()
                fleet.add(HttpClient(newcomer.url, name=newcomer.name))
                while fleet.describe()["engines"][newcomer.name]["version"] is None:
                    time.sleep(0.1)  # in the place of a long step of the trainer
                print("  pod-2 has joined, with the weights that another pod serves", flush=True)
            if step == 1:
                servers.pop(0).kill()
                print("  pod-0 was killed", flush=True)
            for server in servers:
                print(f"  {server.name} answers {server.answer()}", flush=True)


if __name__ == "__main__":
    main()
