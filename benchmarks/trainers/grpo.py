"""Shared code of the benchmarks of GRPO in trainers: a model of random weights with a tokenizer, a reward,
notes of each sync and phase, and the memory of the GPU meanwhile."""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch


def parser_of(description: str | None, runs: Iterable[str]) -> argparse.ArgumentParser:
    """What every one of them is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--only", choices=list(runs))
    return parser


def model(folder: Path, layers: int, hidden: int, vocabulary: int) -> None:
    """A Qwen3 with random weights, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(2, hidden // 512),
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder)
    del made
    torch.cuda.empty_cache()
    special = {
        "<pad>": 0,
        "<eos>": 1,
        "<bos>": 2,
        "\n": 3,
        "<|im_end|>": 4,
    }  # the last two are what verl looks for in a Qwen
    words = special | {f"w{i}": i for i in range(5, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w5"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w5", eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    fast.save_pretrained(folder)


def prompt(row: int) -> str:
    """Words to repeat."""
    return " ".join(f"w{5 + row + j}" for j in range(12))


def wanted(row: int) -> str:
    """The words that are worth something in the answer to a prompt: about half of a small vocabulary."""
    return " ".join(f"w{k}" for k in range(5 + row, 1000))


def reward(answer: str, worth: str) -> float:
    """It differs from answer to answer, so that there is something to learn."""
    words = set(worth.split())
    return sum(word in words for word in answer.split()) / 16


def sums(count: int) -> list[tuple[list[dict], str]]:
    """Return so many sums to ask a chat model for, each as messages and its answer."""
    draw = random.Random(0)
    pairs = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(count)]
    question = "What is {} + {}? Answer with the number only."
    return [([{"role": "user", "content": question.format(a, b)}], str(a + b)) for a, b in pairs]


def digest(model: torch.nn.Module) -> str:
    """Of every parameter's name and bits: 16-bit words times their place, summed where they lie, so
    that a sync's time stays a sync's."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        words = parameter.detach().contiguous().view(torch.int16).flatten()
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, len(words), 1 << 26):
            part = words[start : start + (1 << 26)].long()
            total += (part * (torch.arange(len(part), device=part.device) * 2 + 2 * start + 1)).sum()
        found.update(f"{name} {total.item()}".encode())
    return found.hexdigest()


def overwrite(model: torch.nn.Module) -> None:
    """Weights of which none may stay after a sync."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    torch.cuda.synchronize()


def write(who: str, way: str, began: float, **more: Any) -> None:
    """A line: how a sync went, how long it took since then in seconds, and what its GPU holds then,
    all processes together, in bytes."""
    free, total = torch.cuda.mem_get_info()
    line = {
        "way": way,
        "at": time.time(),
        "seconds": time.perf_counter() - began,
        "used": total - free,
    } | more
    with open(f"{os.environ['RESHARD_WATCH']}.{who}", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def note(rank: int, served: torch.nn.Module | None, way: str, began: float, **more: Any) -> None:
    """How a sync went in this worker of vLLM, and the digest of what it serves now, unless that is None."""
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    if served is not None:
        more["weights"] = digest(served)
    write(str(rank), way, time.perf_counter() - took, **more)


def noted(out: Path, run: str) -> dict[str, list[dict]]:
    """What has been noted, by who noted it: workers of vLLM by their rank, and those of the trainer."""
    found = sorted(out.glob(f"{run}.watch.*"))
    return {
        path.suffix[1:]: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in found
    }


def told(one: dict) -> str:
    """A sync in a few words."""
    took = f" (took {one['took'] / 2**30:.1f})" if "took" in one else ""
    routes = " by " + ", ".join(one["received"]) if one.get("received") else ""
    return (
        f"{one['way']} {one['seconds'] * 1e3:.0f} ms {one['used'] / 2**30:.1f} GiB{took}{routes} "
        f"{one.get('weights', '')[:12]}"
    ).rstrip()


def compare(syncs: dict[str, list[dict]]) -> None:
    """Whether each refit left what the trainer's own sync left after it; and that steps differ,
    without which that would say nothing."""
    for rank, some in syncs.items():
        if not rank.isdigit():
            continue
        refits, stocks = ([one["weights"] for one in some if one["way"] == way] for way in ("refit", "stock"))
        again = [one["weights"] for one in some if one["way"] == "again"]
        equal = [a == b for a, b in zip(refits, stocks)]
        if again:
            equal = [same and a == b for same, a, b in zip(equal, again, stocks)]
        print(
            f"  rank {rank}: equal after each sync {equal}, {len(set(refits))} of {len(refits)} different "
            "from one another",
            flush=True,
        )


def compare_runs(out: Path) -> None:
    """Whether the runs `stock` and `refit` served the same: equal after the first sync, later as
    far as training repeats itself."""
    stock, refit = noted(out, "stock"), noted(out, "refit")
    for rank in filter(str.isdigit, stock):
        pairs = zip(stock[rank], refit.get(rank, []))
        print(
            f"rank {rank}: equal after sync " + ", ".join(str(a["weights"] == b["weights"]) for a, b in pairs)
        )


@contextmanager
def memory(samples: Path, gpu: str = "0") -> Iterator[None]:
    """What a GPU holds, all processes together, each 0.2 s into a file: seconds since the
    epoch and bytes."""
    if not shutil.which("nvidia-smi"):
        yield
        return
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    over = threading.Event()

    def keep() -> None:
        with open(samples, "w", encoding="utf-8") as file:
            while not over.wait(0.2):
                held = subprocess.run(query, capture_output=True, text=True).stdout
                if held.strip().isdigit():
                    print(f"{time.time():.2f} {int(held) << 20}", file=file, flush=True)

    sampler = threading.Thread(target=keep)
    sampler.start()
    try:
        yield
    finally:
        over.set()
        sampler.join()


def by_phase(samples: Path, phases: list[dict]) -> list[tuple[str, float, int]]:
    """Each phase's name, its seconds, and the most that the GPU held in it; a phase lasts until the
    next begins."""
    read = (
        [line.split() for line in samples.read_text(encoding="utf-8").splitlines()]
        if samples.exists()
        else []
    )
    found = []
    for one, after in pairwise(phases):
        held = [int(used) for at, used in read if one["at"] <= float(at) < after["at"]]
        found.append((one["way"], after["at"] - one["at"], max([*held, one["used"], after["used"]])))
    return found
