"""Refits that are begun and switched to, between two GPUs, the engine's of which runs its model all the time.

    python -m benchmarks.refits.switching [--device cuda] [--times 7] [--shares 0.001 0.01 0.05] [--json FILE]

A trainer's rank, and an engine that runs a transformers model of Qwen3-8B's shapes one step after the other, each on a
GPU of its own; on a CPU the model is small. A step of the trainer's changes a share of the elements; it makes the next
one as soon as it may, so that each begun refit has the changes of two.

Medians, in ms, of each share:

- begun: how long the trainer may not change its weights (`packing`); until all has arrived (`background`); between the
  ends of two steps of the engine's model, without (`step`) and with the switch in between (`step with a switch`); the
  switch itself (`switch`), one with digests of all weights compared (`verified`), and the way back (`roll back`);
- all, begun: the same of a refit that brings all as if it had changed, since there is nothing that changes build on;
- refit: how long the trainer, and the engine, stand still in a refit of the same changes by the same link, and in one
  of all by NCCL;

and the floor: both versions read once, at the rate of a plain copy on the trainer's GPU. The engine's bits are compared
with those that the trainer had after each switch, and with those before after each roll back.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.refits.lending import meet, model_of
from benchmarks.refits.relays import sums_of
from reshard.comm.hosts import free_address
from reshard.core.errors import ReshardError
from reshard.refit import RefitGroup, connect
from reshard.refit.link import Link
from tests.tools.whole_model import ServedModel, TrainedModel

SECRET = "between both of these"
TRAINER, ENGINE = range(2)
BATCH, TOKENS = 8, 64
MEMORY = 20 << 30  # of changes, or of all


def main() -> None:
    """Start the processes, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.05])
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        addresses = [free_address("127.0.0.1") for _ in range(2)]
        command = [sys.executable, "-m", "benchmarks.refits.switching", *sys.argv[1:], "--folder", folder]
        command += ["--addresses", *addresses]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in (TRAINER, ENGINE)]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(1)
        sides = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (TRAINER, ENGINE)]
    result: dict = {"device": options.device, "bytes": sides[0].pop("bytes"), "floor": sides[0].pop("floor")}
    for side in sides:
        for case, figures in side.items():
            result.setdefault(case, {}).update(figures)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


def measure(options: argparse.Namespace) -> None:
    """Run this process's side."""
    torch.set_num_threads(1)
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(options.rank)
    # The last address is for what both have to tell each other.
    group = RefitGroup.join(options.addresses[-1], options.rank, 2, timeout=300, secret=SECRET)
    members = RefitGroup.join(options.addresses[0], options.rank, 2, timeout=120, secret=SECRET)
    model = model_of(options)
    common = {"backend": "nccl", "delta": True, "keep_mapped": True, "pending_bytes": MEMORY}
    common["bucket_bytes"] = options.bucket_bytes
    if options.rank == TRAINER:
        side: Trainer | Serving = Trainer(model, group, connect(members, TrainedModel(model), None, **common))
    else:
        engine = ServedModel(model)
        for name, parameter in model.named_parameters():  # it serves what the model runs with
            parameter.data = engine.tensors[name]
        side = Serving(model, engine, group, connect(members, None, engine, **common))
    figures: dict = {"bytes": side.size(), "floor": side.floor()} if isinstance(side, Trainer) else {}
    side.refit(0.0)
    for share in options.shares:
        case = f"{2 * share:.1%} changed"  # a step before each refit that is begun, and one while it goes on
        side.begun(share)  # which compiles
        made = [side.begun(share, verify=number == options.times - 1) for number in range(options.times)]
        refits = [side.refit(share) for _ in range(options.times)]
        figures[case] = medians(made) | {f"refit: {side.name} stands still": statistics.median(refits[1:])}
    made = []
    for _ in range(options.times + 1):
        side.forget()
        made.append(side.begun(options.shares[0]))
    figures["all, begun"] = medians(made[1:])
    side.link.close()
    figures["all"] = side.whole(options)
    (options.folder / f"{options.rank}.json").write_text(json.dumps(figures))


def medians(made: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of what was measured several times, by name."""
    values = defaultdict(list)
    for one in made:
        for name, value in one.items():
            values[name].append(value)
    return {name: statistics.median(of_name) for name, of_name in values.items()}


def synchronize() -> None:
    """Wait for this process's GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(model: torch.nn.Module, share: float) -> None:
    """Flip a bit in this share of a model's elements, as a step that changes so many."""
    with torch.no_grad():
        for parameter in model.parameters():
            words = parameter.view(torch.int16)
            words ^= (torch.rand_like(parameter, dtype=torch.float32) < share).to(torch.int16)


class Side:
    """One of both processes: its model, and its link."""

    name = ""

    def __init__(self, group: RefitGroup, link: Link) -> None:
        self.group, self.link = group, link
        self.version, self.last = 0, b""  # the bits of the version before

    def compare(self, bits: bytes, what: str) -> None:
        """Compare the bits of both sides."""
        self.group.begin(what)
        answers = self.group.gather("bits", bits)
        self.group.commit()
        if len({*answers}) > 1:
            raise ReshardError(f"the engine's bits are not those of the trainer ({what})")

    def refit(self, share: float) -> float:
        """Refit; return the ms that this side stands still."""
        self.prepare(share)
        meet(self.group, "a refit")
        synchronize()
        began = time.perf_counter()
        self.link.refit(self.version)
        seconds = time.perf_counter() - began
        self.version += 1
        self.last = self.bits()
        self.compare(self.last, "a refit")
        return 1e3 * seconds

    def prepare(self, share: float) -> None:
        """Change this side's weights, where it trains."""

    def forget(self) -> None:
        """Leave the next refit nothing that changes build on, where this side trains."""

    def bits(self) -> bytes:
        """Return sums of this side's bits."""
        raise NotImplementedError


class Trainer(Side):
    """The trainer's."""

    name = "the trainer"

    def __init__(self, model: torch.nn.Module, group: RefitGroup, link: Link) -> None:
        super().__init__(group, link)
        self.model = model

    def prepare(self, share: float) -> None:
        train(self.model, share)

    def forget(self) -> None:
        self.link.roll_back()

    def bits(self) -> bytes:
        return sums_of(self.model, None)

    def begun(self, share: float, verify: bool = False) -> dict[str, float]:
        """Begin a refit, and train on; return what that took."""
        before = self.last
        self.prepare(share)
        now = self.last = self.bits()
        meet(self.group, "a begin")
        synchronize()
        began = time.perf_counter()
        begun = self.link.begin_refit(self.version, verify)
        packing = time.perf_counter() - began
        self.prepare(share)  # it trains on
        report = begun.wait()
        assert report.is_pending, report
        self.version += 1
        for bits, what in ((before, "pending"), (now, "switched"), (before, "rolled back"), (now, "again")):
            self.compare(bits, what)
        delta = report.delta
        return {
            "packing": 1e3 * packing,
            "background": 1e3 * report.transfer_seconds,
            "MB": report.packed_bytes / 1e6,
            "changed": delta.changed if delta is not None and delta.changed is not None else 0.0,
        }

    def size(self) -> int:
        """Return the bytes of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def floor(self) -> float:
        """Return the ms in which this device reads two versions, by the rate of a plain copy."""
        one = torch.empty(
            1 << (30 if torch.cuda.is_available() else 26), dtype=torch.uint8, device=self.link.device
        )
        other, seconds = torch.empty_like(one), []
        for _ in range(5):
            synchronize()
            began = time.perf_counter()
            other.copy_(one)
            synchronize()
            seconds.append(time.perf_counter() - began)
        return 1e3 * self.size() * min(seconds) / len(one)

    def whole(self, options: argparse.Namespace) -> dict[str, float]:
        """Refit all by a link without deltas; return the ms that the trainer stands still."""
        self.link = connect(
            self.link.group, TrainedModel(self.model), None, backend="nccl", keep_mapped=True,
            bucket_bytes=options.bucket_bytes,
        )  # fmt: skip
        return {
            "refit: the trainer stands still": statistics.median([self.refit(0.01) for _ in range(4)][1:])
        }


class Serving(Side):
    """The engine's, which runs its model."""

    name = "the engine"

    def __init__(self, model: torch.nn.Module, engine: ServedModel, group: RefitGroup, link: Link) -> None:
        super().__init__(group, link)
        self.model, self.engine = model, engine
        self.tokens = torch.randint(1000, (BATCH, TOKENS), device=engine.device)

    @torch.no_grad()
    def step(self) -> float:
        """Run the model once; return when it had ended."""
        self.model(input_ids=self.tokens, use_cache=False)
        synchronize()
        return time.perf_counter()

    def steps(self, count: int) -> float:
        """Return the ms of a step."""
        ends = [self.step() for _ in range(count + 1)]
        return 1e3 * (ends[-1] - ends[0]) / count

    def bits(self) -> bytes:
        return sums_of(None, self.engine)

    def begun(self, share: float, verify: bool = False) -> dict[str, float]:
        """Take part in a refit that is begun, and switch to it; return what that took."""
        usual = self.steps(8)
        meet(self.group, "a begin")
        began = time.perf_counter()
        begun = self.link.begin_refit(self.version, verify)
        call, ends = time.perf_counter() - began, [self.step()]
        while not begun.is_done:
            ends.append(self.step())
        assert begun.wait().is_pending
        self.compare(self.bits(), "pending")
        last = self.step()
        began = time.perf_counter()
        self.link.switch(self.version, keep_caches=True)
        switch = time.perf_counter() - began
        with_switch = self.step() - last
        self.version += 1
        self.compare(self.bits(), "switched")
        began = time.perf_counter()
        self.link.roll_back(keep_caches=True)
        back = time.perf_counter() - began
        self.compare(self.bits(), "rolled back")
        self.link.switch(keep_caches=True)
        self.compare(self.bits(), "again")
        meanwhile = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
        return {
            "call": 1e3 * call,
            "step": usual,
            "step meanwhile": 1e3 * meanwhile,
            "step with a switch": 1e3 * with_switch,
            ("verified" if verify else "switch"): 1e3 * switch,
            "roll back": 1e3 * back,
        }

    def whole(self, options: argparse.Namespace) -> dict[str, float]:
        """Refit all by a link without deltas; return the ms that the engine stands still."""
        self.link = connect(
            self.link.group,
            None,
            self.engine,
            backend="nccl",
            keep_mapped=True,
            bucket_bytes=options.bucket_bytes,
        )
        return {"refit: the engine stands still": statistics.median([self.refit(0.01) for _ in range(4)][1:])}


if __name__ == "__main__":
    main()
