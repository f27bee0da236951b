"""Spoil the files of checkpoints and see that every command answers with one sentence or with what is right.

    python -m tests.campaigns.fuzz --seed 0 --mutations 1000        # what failed goes to fuzz-failures.jsonl
    python -m tests.campaigns.fuzz --replay fuzz-failures.jsonl     # only those again

The first prints a summary. Every mutation runs in a process of its own, forked from one that has everything
imported, with 2 GiB of memory and 30 seconds of a core. What a command says is held against the unspoiled
conversion and, where that does not agree, against what torch's and safetensors' own readers find in the
spoiled files, arranged by hand. A mutation is given by seed and number alone, so it can be run again
anywhere.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from reshard import ReshardError
from tests.campaigns.fuzz_adapters import adapters
from tests.campaigns.fuzz_chains import chains
from tests.campaigns.fuzz_judges import OWN, judged
from tests.campaigns.fuzz_subjects import FAMILIES, Subject, run_command, subjects
from tests.campaigns.mutations import mutations_of

MEMORY_BYTES = 2 << 30
SECONDS = 30  # of a core; a busy machine may take four times as long
GOOD = ("refused", "right", "right for what the files say now", "differs")


@dataclass
class Outcome:
    """What came of one mutation."""

    seed: int
    number: int
    subject: str
    command: str
    mutation: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    memory_bytes: int = 0


def spoil(seed: int, number: int, found: list[Subject], folder: Path) -> tuple[Subject, str, str]:
    """Copy a subject to `folder`/spoiled and spoil it: the subject, the command to run on it, and
    what was done."""
    rng = random.Random(f"{seed}:{number}")
    subject = rng.choice(found)
    spoiled = folder / "spoiled"
    shutil.copytree(subject.path, spoiled)
    notes = []
    for _ in range(rng.choice([1, 1, 1, 1, 1, 2])):
        groups: dict[str, list[Path]] = {}
        for path in sorted(spoiled.rglob("*")):
            if path.is_file() and path.stat().st_size < 1 << 24 and path.name != "megatron_flags.txt":
                groups.setdefault(
                    path.suffix if path.suffix in (".safetensors", ".distcp") else path.name, []
                ).append(path)
        often = [
            group
            for group in groups
            if group
            in (".metadata", ".distcp", ".safetensors", "config.json", "adapter_config.json", "common.pt")
        ]
        path = rng.choice(groups[rng.choice(rng.choice([often, often, often, list(groups)]) or list(groups))])
        try:
            note = rng.choice(mutations_of(path))(rng, path)
        except Exception as error:
            note = f"not spoiled ({type(error).__name__}: {error!s:.60})"  # a mutation that this file does not take
        notes.append(f"{path.relative_to(spoiled)}: {note}")
    if subject.kind in OWN:
        own = OWN[subject.kind]
        return subject, rng.choice(own.COMMANDS), "; ".join(notes) + own.forge(rng, spoiled)
    convert = "hf-to-mcore" if subject.kind == "hf" else "mcore-to-hf"
    command = rng.choice(
        [convert, convert, convert, "inspect", "diff"] + (["check"] if subject.written else [])
    )
    return subject, command, "; ".join(notes)


def _arguments(command: str, subject: Subject, folder: Path) -> list[str]:
    spoiled, out = str(folder / "spoiled"), str(folder / "out")
    return {
        "hf-to-mcore": ["hf-to-mcore", spoiled, out, "--tp", "2", "--no-sync", "--workers", "1"],
        "mcore-to-hf": ["mcore-to-hf", spoiled, out, "--no-sync", "--workers", "1"],
        "inspect": ["inspect", spoiled, "--tensors", "--json"],
        "diff": ["diff", spoiled, str(subject.partner), "--json", "--workers", "1"],
        "delta-apply": ["delta", "apply", str(subject.partner), spoiled, out, "--no-sync", "--workers", "1"],
        "delta-show": ["delta", "show", spoiled, "--json"],
        "lora-merge": [
            "lora-merge",
            str(subject.partner),
            spoiled,
            out,
            "--no-sync",
            "--workers",
            "1",
        ],
        "check": ["check", spoiled, "--json", "--workers", "1"],
    }[command]


@contextlib.contextmanager
def limited(memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """No more than so many bytes of address space beyond what this process has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def forked(
    work: Callable[[Callable[[Any], None]], None], seconds: float = 4 * SECONDS, after: float = 300
) -> list[Any]:
    """Run `work(say)` in a fork; what it said, JSON values. It has `seconds` until the first word
    and `after` until the next ones.

    A process that takes longer is killed; one that ends otherwise than by itself has said fewer words.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            work(lambda value: os.write(write, json.dumps(value).encode() + b"\n"))
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    data, wait = b"", seconds
    deadline = time.monotonic() + wait
    while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        if data.count(b"\n") < (data + piece).count(b"\n"):
            deadline = time.monotonic() + after
        data += piece
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [json.loads(line) for line in data.splitlines()]


def run_one(seed: int, number: int, found: list[Subject], folder: Path) -> Outcome:
    """One mutation, in `folder`, which must be empty."""
    subject, command, note = spoil(seed, number, found, folder)
    return answered(
        subject, command, folder, Outcome(seed, number, subject.name, command, note, "time", "no answer")
    )


def answered(subject: Subject, command: str, folder: Path, outcome: Outcome) -> Outcome:
    """What a command makes of the spoiled subject in `folder`, and what judges say of that."""

    def work(say: Callable[[Any], None]) -> None:
        torch.set_num_threads(1)
        start, status, printed = time.process_time(), 0, ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with limited():
                status, printed = run_command(_arguments(command, subject, folder))
            verdict, detail = "answered", ""
        except ReshardError as error:
            sentence = str(error)
            fine = sentence and "\n" not in sentence and len(sentence) < 1500
            verdict, detail = ("refused" if fine else "no sentence"), sentence[:300]
            left = sorted({p.name for p in folder.iterdir()} - {"spoiled"})
            if left:
                verdict, detail = "left behind", f"{left} after: {detail}"
        except MemoryError:
            verdict, detail = "memory", traceback.format_exc(limit=-3)
        except BaseException:
            verdict, detail = "traceback", traceback.format_exc(limit=-4)
        seconds, memory = (
            time.process_time() - start,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak,
        )
        say([verdict, detail, seconds, memory * 1024])
        if verdict == "answered":
            with limited(2 * MEMORY_BYTES):  # torch's reader has no bounds of its own
                say(judged(command, subject, folder, status, printed))

    words = forked(work)
    if words:
        outcome.verdict, outcome.detail, outcome.seconds, outcome.memory_bytes = words[0]
        if outcome.verdict == "answered":
            outcome.verdict, outcome.detail = (
                words[1] if len(words) > 1 else ("no judgment", "the judge ended early")
            )
        elif outcome.seconds > SECONDS:
            outcome.verdict, outcome.detail = "time", f"{outcome.seconds:.0f} s until: {outcome.detail}"
    return outcome


def run(
    seed: int,
    numbers: list[int],
    found: list[Subject],
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run these mutations, one after the other."""
    outcomes = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="reshard-fuzz-") as folder:
            outcomes.append(run_one(seed, number, found, Path(folder)))
        report(outcomes[-1])
    return outcomes


def failed(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes that are neither a sentence nor right."""
    return [outcome for outcome in outcomes if outcome.verdict not in GOOD]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="The number of the first mutation.")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument(
        "--failures",
        type=Path,
        default=Path("fuzz-failures.jsonl"),
        help="Where failing mutations are saved.",
    )
    parser.add_argument("--replay", type=Path, help="Run the mutations of such a file again.")
    options = parser.parse_args()
    wanted = [(options.seed, number) for number in range(options.first, options.first + options.mutations)]
    families = tuple(options.families.split(","))
    if options.replay:
        lines = [json.loads(line) for line in options.replay.read_text().splitlines()]
        wanted, families = (
            [(line["seed"], line["number"]) for line in lines],
            tuple(lines[0]["families"]) if lines else families,
        )
    start, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="reshard-fuzz-subjects-") as folder:
        found = subjects(Path(folder), families) + chains(Path(folder) / "of chains")
        found += adapters(Path(folder) / "of adapters")
        print(
            f"{len(found)} checkpoints, chains and adapters made in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        for seed, number in wanted:
            outcomes += run(seed, [number], found)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} mutations, {time.monotonic() - start:.0f} s", flush=True)
            if failed(outcomes[-1:]) or options.replay:
                last = outcomes[-1]
                print(
                    f"{last.verdict}: {seed}:{number} {last.command} of {last.subject}, "
                    f"{last.mutation}\n    {last.detail}",
                    flush=True,
                )
    bad = failed(outcomes)
    if not options.replay:
        options.failures.write_text(
            "".join(json.dumps(asdict(o) | {"families": families}) + "\n" for o in bad)
        )
    print(f"{len(outcomes)} mutations in {time.monotonic() - start:.0f} s, {len(bad)} not answered well")
    for verdict, n in Counter(o.verdict for o in outcomes).most_common():
        print(f"  {n:6} {verdict}")
    if outcomes:
        slow, large = max(outcomes, key=lambda o: o.seconds), max(outcomes, key=lambda o: o.memory_bytes)
        print(
            f"slowest {slow.seconds:.1f} s ({slow.seed}:{slow.number}), most memory "
            f"{large.memory_bytes >> 20} MiB ({large.seed}:{large.number})"
        )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
