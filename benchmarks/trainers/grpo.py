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

PATCH, MERGED = 16, 2  # of Qwen3-VL: pixels of a patch's side, and patches of a token's
# What processes are started with to train alike each time.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


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
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
    save_random(folder, Qwen3ForCausalLM, config)
    special = {
        "<pad>": 0,
        "<eos>": 1,
        "<bos>": 2,
        "\n": 3,
        "<|im_end|>": 4,
    }  # the last two are what verl looks for in a Qwen
    words = special | {f"w{i}": i for i in range(5, vocabulary)}
    fast = tokenizer_of(words, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    fast.save_pretrained(folder)


def model_with_tower(folder: Path, layers: int, hidden: int) -> None:
    """A Qwen3-VL with random weights and as many layers in its tower, and its processor; special tokens have the
    numbers of the published models, which ms-swift expects."""
    import transformers

    special = {
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652,
        "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=dict(
            vocab_size=151936, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 128, num_key_value_heads=max(2, hidden // 512), head_dim=128,
            max_position_embeddings=2048, eos_token_id=151645, bos_token_id=151643, pad_token_id=151643,
            rope_parameters={
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        ),
        vision_config=dict(
            depth=layers, hidden_size=hidden // 2, intermediate_size=2 * hidden, num_heads=hidden // 128,
            out_hidden_size=hidden, patch_size=PATCH, num_position_embeddings=256,
            deepstack_visual_indexes=[*range(min(3, layers))],
        ),
        image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653,
    )  # fmt: skip
    save_random(folder, transformers.Qwen3VLForConditionalGeneration, config)
    numbers = {number: word for word, number in special.items()}
    words = {numbers.get(number, f"w{number}"): number for number in range(151936)}
    fast = tokenizer_of(
        words, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=[*special]
    )
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGED}
    one = (PATCH * MERGED) ** 2
    images = transformers.Qwen2VLImageProcessor(
        **sizes, size={"shortest_edge": one, "longest_edge": 64 * one}
    )
    videos = transformers.Qwen3VLVideoProcessor(**sizes)
    transformers.Qwen3VLProcessor(images, fast, videos).save_pretrained(folder)


def picture(file: Path, row: int) -> None:
    """Save a picture of noise that is six tokens."""
    from PIL import Image

    side, draw = PATCH * MERGED, random.Random(row)
    Image.frombytes("RGB", (3 * side, 2 * side), draw.randbytes(18 * side**2)).save(file)


def save_random(folder: Path, kind: Any, config: Any) -> None:
    """Save a model of a class with random weights in bf16."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = kind(config)
    torch.set_default_dtype(torch.float32)
    made.save_pretrained(folder)
    del made
    torch.cuda.empty_cache()


def tokenizer_of(words: dict[str, int], **special: Any) -> Any:
    """A tokenizer of words with a space between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w5"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w5", **special)


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


def deterministic() -> None:
    """Have PyTorch use kernels that repeat themselves where it has such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a cache of vLLM, say


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
        if hasattr(served, "visual"):
            more["tower"] = digest(served.visual)
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
        towers = {one["tower"] for one in some if "tower" in one}
        print(
            f"  rank {rank}: equal after each sync {equal}, {len(set(refits))} of {len(refits)} different "
            "from one another" + (f", and {len(towers)} different towers" if towers else ""),
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
