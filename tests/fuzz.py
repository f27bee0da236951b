"""Spoil the files of checkpoints and see that every command answers with one sentence or with what is right.

    python -m tests.fuzz --seed 0 --mutations 1000            # a summary; what failed goes to fuzz-failures.jsonl
    python -m tests.fuzz --replay fuzz-failures.jsonl         # only those again

Every mutation runs in a process of its own, forked from one that has everything imported, with 2 GiB of memory and 30 seconds of a core. What a
command says is held against the unspoiled conversion and, where that does not agree, against what torch's and safetensors' own
readers find in the spoiled files, arranged by hand. A mutation is given by seed and number alone, so it can be run again anywhere.
"""

import argparse
import contextlib
import io
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, hf_to_mcore, mcore_to_hf
from reshard.cli.main import cli
from tests import readings
from tests.checkpoints import make
from tests.mutations import mutations_of
from tests.oracle import dequantized, hf_tensors, megatron_tensors, same, stored_tensors

MEMORY_BYTES = 2 << 30
SECONDS = 30  # of a core; a busy machine may take four times as long
FAMILIES = ("qwen3-moe", "llama-rope-tied", "deepseek-v3")
# How what is written back is quantized.
QUANTIZED = {"deepseek-v3": "fp8", "qwen3-moe": "fp8_per_channel"}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # their padding is no model's
GOOD = ("refused", "right", "right for what the files say now", "differs")


@dataclass
class Subject:
    """A checkpoint to spoil: `written` by reshard (with a manifest) or not; `truth` is what it holds, `listing` what inspect says."""

    name: str
    path: Path
    kind: str
    written: bool
    partner: Path
    truth: dict[str, torch.Tensor]
    megatron: dict[str, torch.Tensor]
    listing: dict[str, Any] = field(default_factory=dict)


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


def subjects(folder: Path, families: tuple[str, ...] = FAMILIES) -> list[Subject]:
    """Small checkpoints of each family: as published, as reshard writes them in both formats, and as training saves them."""
    found = []
    for family in families:
        base = folder / family
        published, mcore, saved, back = base / "published", base / "mcore", base / "saved", base / "back"
        make(published, family, dtype=torch.bfloat16, **({"mtp": True} if family == "deepseek-v3" else {}))
        (published / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
        (published / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
        if family == "qwen3-moe":
            _shard(published)
        truth = hf_tensors(published)
        hf_to_mcore(published, mcore, MegatronLayout(tp=2), sync=False)
        way = QUANTIZED.get(family, False)
        mcore_to_hf(mcore, back, max_shard_size="200KB", sync=False, quantize=way)
        _save_by_torch(mcore, saved)
        megatron = stored_tensors(mcore / "release")
        requantized = dequantized(back)
        quantized_megatron = megatron_tensors(
            back, len(megatron["embedding.word_embeddings.weight"]), requantized
        )
        partner = mcore
        if way:
            partner = base / "mcore-of-back"
            hf_to_mcore(back, partner, MegatronLayout(tp=2), sync=False)
        found += [
            Subject(f"{family} published", published, "hf", False, mcore, truth, megatron),
            Subject(f"{family} back", back, "hf", True, partner, requantized, quantized_megatron),
            Subject(f"{family} mcore", mcore, "mcore", True, published, truth, megatron),
            Subject(f"{family} saved", saved, "mcore", False, published, truth, megatron),
        ]
    for subject in found:
        subject.listing = json.loads(_printed(["inspect", str(subject.path), "--tensors", "--json"])[1])[
            "tensors"
        ]
    return found


def _shard(directory: Path) -> None:
    """Three files and an index in place of one file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        part = {n: tensors[n] for n in names[i::3]}
        save_file(part, directory / f"model-{i + 1:05d}-of-00003.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, f"model-{i + 1:05d}-of-00003.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def _save_by_torch(mcore: Path, directory: Path) -> None:
    """The same tensors as torch saves them, with the args and nothing of reshard's beside them."""
    import torch.distributed.checkpoint as dcp

    release = directory / "release"
    dcp.save(
        stored_tensors(mcore / "release"), storage_writer=dcp.FileSystemWriter(str(release)), no_dist=True
    )
    torch.save(torch.load(mcore / "release" / "common.pt", weights_only=False), release / "common.pt")
    for name in ("release/metadata.json", "latest_checkpointed_iteration.txt"):
        shutil.copy(mcore / name, directory / name)


def spoil(seed: int, number: int, found: list[Subject], folder: Path) -> tuple[Subject, str, str]:
    """Copy a subject to `folder`/spoiled and spoil it: the subject, the command to run on it, and what was done."""
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
            if group in (".metadata", ".distcp", ".safetensors", "config.json", "common.pt")
        ]
        path = rng.choice(groups[rng.choice(rng.choice([often, often, often, list(groups)]) or list(groups))])
        try:
            note = rng.choice(mutations_of(path))(rng, path)
        except Exception as error:
            note = f"not spoiled ({type(error).__name__}: {error!s:.60})"  # a mutation that this file does not take
        notes.append(f"{path.relative_to(spoiled)}: {note}")
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
        "check": ["check", spoiled, "--json", "--workers", "1"],
    }[command]


def _printed(arguments: list[str]) -> tuple[int, str]:
    """The exit status and the output of a command line, run here."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        status = cli(arguments, prog_name="reshard", standalone_mode=False)
    return (status if isinstance(status, int) else 0), out.getvalue()


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
    """Run `work(say)` in a fork; what it said, JSON values. It has `seconds` until the first word and `after` until the next ones.

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
                status, printed = _printed(_arguments(command, subject, folder))
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


def judged(command: str, subject: Subject, folder: Path, status: int, printed: str) -> tuple[str, str]:
    """Whether what a command did is right, by readers that share no code with it."""
    spoiled, out = folder / "spoiled", folder / "out"
    try:
        if command == "inspect":
            listing = json.loads(printed)["tensors"]
            if subject.kind == "mcore":
                return _listed(subject, spoiled, listing)
            if listing == subject.listing:
                return "right", ""
            now = {name: list(tensor.shape) for name, tensor in dequantized(spoiled).items()}
            wrong = [name for name, entry in listing.items() if now.get(name) != entry["shape"]]
            return ("wrong", f"inspect: {wrong[:3]}") if wrong else ("right for what the files say now", "")
        if command in ("diff", "check"):
            if status:
                return "differs", ""
            wrong = _unlike_the_truth(subject, spoiled)
            return ("wrong", f"{command} says equal: {wrong[:3]}") if wrong else ("right", "")
        meaning = _another_model(subject, spoiled, out)
        if meaning:
            return "wrong", f"another model: {meaning[:3]}"
        if command == "hf-to-mcore":
            got = stored_tensors(out / "release")
            if not same(got, subject.megatron):
                return "right", ""
        else:
            got = hf_tensors(out)
            if not same(got, subject.truth):
                return "right", ""
        if _vouched_for(subject, spoiled):
            return "wrong", "other bytes than the manifest has"
        if command == "hf-to-mcore":
            rows = len(got["embedding.word_embeddings.weight"])
            expected = megatron_tensors(spoiled, rows, dequantized(spoiled))
        else:
            now = stored_tensors(spoiled / "release")
            expected = megatron_tensors(out, len(now["embedding.word_embeddings.weight"]))
            got = {key: now[key] for key in subject.megatron}
        vocab = len(subject.truth["model.embed_tokens.weight"])
        wrong = same(
            *(
                {k: t[:vocab] if k in VOCABULARY else t for k, t in tensors.items()}
                for tensors in (got, expected)
            )
        )
        return ("wrong", f"{wrong[:3]}") if wrong else ("right for what the files say now", "")
    except BaseException:
        return "no judgment", traceback.format_exc(limit=-3)


def _unlike_the_truth(subject: Subject, spoiled: Path) -> list[str]:
    """The tensors that other readers find changed in the spoiled files; none where they cannot read them."""
    try:
        if subject.kind == "hf":
            return same(dequantized(spoiled), subject.truth)
        now = stored_tensors(spoiled / "release")
        return same({k: now[k] for k in subject.megatron if k in now}, subject.megatron)
    except BaseException:  # torch's CheckpointException is no Exception
        return []


def _vouched_for(subject: Subject, spoiled: Path) -> bool:
    """Whether the manifest is there as it was written: then nothing but what it lists may be made of the rest."""
    manifest = spoiled / "reshard.json"
    return (
        subject.written
        and manifest.is_file()
        and manifest.read_bytes() == (subject.path / "reshard.json").read_bytes()
    )


def _another_model(subject: Subject, spoiled: Path, out: Path) -> list[str]:
    """Where what was written describes another model than the spoiled files do, both read by hand (`readings`)."""
    original = subject.path if subject.kind == "hf" else subject.path / "hf"
    before = json.loads(
        (original if original.is_dir() else subject.partner).joinpath("config.json").read_text()
    )
    kind = before["model_type"]
    if subject.kind == "hf":
        text = (spoiled / "config.json").read_bytes()
        said = readings.of_flags(out / "megatron_flags.txt", kind)
        args = vars(torch.load(out / "release" / "common.pt", weights_only=False)["args"])
        meant = readings.of_config(json.loads(text), before)
        if kind == "deepseek_v3" and not any("enorm" in name for name in hf_tensors(spoiled)):
            meant["mtp_num_layers"] = 0  # it is announced, and not there
        copied = [] if (out / "hf" / "config.json").read_bytes() == text else ["hf/config.json is no copy"]
        return copied + readings.unlike(said, meant) + readings.unlike(readings.of_args(args, kind), meant)
    written = readings.of_config(json.loads((out / "config.json").read_text()), before)
    written["strange"] = [] if original.is_dir() else [name for name in written["strange"] if "=" in name]
    beside = spoiled / "hf" / "config.json"
    if beside.is_file():
        return readings.unlike(written, readings.of_config(json.loads(beside.read_text()), before))
    args = vars(torch.load(spoiled / "release" / "common.pt", weights_only=False)["args"])
    return readings.unlike(written, readings.of_args(args, kind))


def _listed(subject: Subject, spoiled: Path, listing: dict[str, Any]) -> tuple[str, str]:
    """Whether `inspect` lists what torch finds in a Megatron checkpoint's ``.metadata``, arranged by hand, without bytes."""
    import torch.distributed.checkpoint as dcp

    try:
        entries = dcp.FileSystemReader(str(spoiled / "release")).read_metadata().state_dict_metadata
        found = {
            key: torch.empty(e.size, dtype=e.properties.dtype, device="meta")
            for key, e in entries.items()
            if hasattr(e, "size")
        }
    except BaseException:
        same_as_before = listing == subject.listing
        return (
            ("right", "")
            if same_as_before
            else ("wrong", "inspect lists other tensors of what torch cannot read")
        )
    config = next(
        path.parent
        for path in (spoiled / "hf" / "config.json", subject.partner / "config.json")
        if path.is_file()
    )
    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta")
        for name, entry in listing.items()
    }
    expected = megatron_tensors(config, len(found["embedding.word_embeddings.weight"]), tensors)
    wrong = [
        key
        for key, t in expected.items()
        if key not in found or (found[key].shape, found[key].dtype) != (t.shape, t.dtype)
    ]
    if wrong:
        return "wrong", f"inspect: {wrong[:3]}"
    return ("right" if listing == subject.listing else "right for what the files say now"), ""


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
        found = subjects(Path(folder), families)
        print(f"{len(found)} checkpoints made in {time.monotonic() - start:.0f} s", flush=True)
        for seed, number in wanted:
            outcomes += run(seed, [number], found)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} mutations, {time.monotonic() - start:.0f} s", flush=True)
            if failed(outcomes[-1:]) or options.replay:
                last = outcomes[-1]
                print(
                    f"{last.verdict}: {seed}:{number} {last.command} of {last.subject}, {last.mutation}\n    {last.detail}",
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
            f"slowest {slow.seconds:.1f} s ({slow.seed}:{slow.number}), most memory {large.memory_bytes >> 20} MiB ({large.seed}:{large.number})"
        )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
