"""A real ``vllm serve`` without a GPU."""

import json
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.install_vllm_cpu import environment_of_engine
from tests.starting.ranks import free_port
from tests.starting.warm import python_of_engine

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def served(directory: Path, *options, log: Path, port: int | None = None, **environment: str):
    """The address of a ``vllm serve`` that has started; its processes are ended."""
    port = port or free_port()
    command = [python_of_engine(), "-m", "vllm.entrypoints.cli.main", "serve", directory, "--enforce-eager", "--dtype",
               "float32", "--max-model-len", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "8",
               "--kv-cache-memory-bytes", str(1 << 24), "--port", str(port), *options]  # fmt: skip
    variables = environment_of_engine() | {"VLLM_LOGGING_LEVEL": "INFO"} | environment
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    with open(log, "wb") as file, subprocess.Popen(
        [*map(str, command)], stdout=file, stderr=file, env=variables, cwd=ROOT
    ) as process:  # fmt: skip
        try:
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                with suppress(OSError):
                    urllib.request.urlopen(url + "/health", timeout=5).close()
                    break
                time.sleep(0.5)
            yield url
        finally:
            family = (
                [process, *psutil.Process(process.pid).children(recursive=True)]
                if process.poll() is None
                else []
            )
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.terminate()
            psutil.wait_procs([one for one in family if one is not process], timeout=30)
            process.wait(30)


def post(url: str, body: dict, answers: bool = True, seconds: float = 120) -> dict:
    """What a route answers within so many seconds; nothing where it does not."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.loads(response.read()) if answers else {}


def two_checkpoints(folder: Path, variant: str = "served-qwen3") -> list[tuple[str, str]]:
    """Make two models of other weights, each as a Hugging Face directory and as a Megatron checkpoint; the first
    directory can be served."""
    from reshard import MegatronLayout, hf_to_mcore
    from tests.tools.checkpoints import make

    pairs = []
    for seed in (0, 1):
        hf, mcore = folder / f"hf {seed}", folder / f"mcore {seed}"
        make(hf, variant, seed=seed)
        hf_to_mcore(hf, mcore, MegatronLayout())
        pairs.append((str(hf), str(mcore)))
    with_tokenizer(folder / "hf 0")
    return pairs


def with_tokenizer(directory: Path) -> None:
    """Give a checkpoint of 1000 words a tokenizer, whose words are w0, w1 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
