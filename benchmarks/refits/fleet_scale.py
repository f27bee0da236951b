"""What connecting and refitting a fleet costs beside the bytes of weights, without GPUs.

    python -m benchmarks.refits.fleet_scale [--members 64 256 1024 2048] [--model qwen3-30b-a3b] [--json FILE]

One real hub, and members as threads of a few processes, each with a real connection to it over this host's loopback,
with the real calls of a connect and of refits (`benchmarks.refits.fleet_members`). Half of them are the trainer's
ranks, each stage of whose pipeline shares the experts out, the others engines of 16 ranks (TP16, expert parallel). All
have a simulated GPU, eight to a host, and hold what a rank of the model's published shapes holds. No tables of copies
are made, no communicator, and nothing is copied.

Reported for each number of members: messages, bytes and CPU seconds of the hub for the meeting, the connect and a refit
(the median), in all and by message, and the CPU seconds of one rank of each side, by part. The hub is one thread: no
fleet connects in less than its seconds. Wall time is also given, but is that of all members on this machine's cores.
"""

import argparse
import gc
import json
import multiprocessing
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.refits.fleet_members import MEASURED, Member, share_work
from benchmarks.refits.fleet_sides import Fleet, Sides
from reshard.comm import group as grouping
from reshard.comm.channel import FrameReader, FrameWriter, Message
from reshard.comm.hosts import free_address
from reshard.comm.hub import Hub
from reshard.comm.server import Client
from reshard.refit import receiver as receiving
from reshard.refit.protocol.held import pack_held

MEMBERS_OF_A_PROCESS = 128
STACK_BYTES = 1 << 20
FAILED = "failed"  # what is said of a member
CONTROL = ("Join", "Begin", "Prepare", "Commit", "Alive")  # messages without a key, or with a key each


@dataclass
class Load:
    """The hub's load from its start on: `answers` and `cpu` by the message that brings them about."""

    messages: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    thread_seconds: float = 0.0
    wall: float = field(default_factory=time.perf_counter)

    def copy(self) -> "Load":
        """Return what it is now."""
        return Load(*(vars(self)[name].copy() for name in ("messages", "answers", "bytes_out", "cpu")), self.bytes_in,
                    self.thread_seconds)  # fmt: skip

    def since(self, before: "Load") -> dict[str, Any]:
        """Return the load between two moments."""
        return {
            "wall": self.wall - before.wall,
            "hub_cpu": self.thread_seconds - before.thread_seconds,
            "messages": (self.messages - before.messages).total(),
            "answers": (self.answers - before.answers).total(),
            "bytes_in": self.bytes_in - before.bytes_in,
            "bytes_out": (self.bytes_out - before.bytes_out).total(),
            "by_message": {
                key: {
                    "messages": count,
                    "bytes_out": self.bytes_out[key] - before.bytes_out[key],
                    "cpu": self.cpu[key] - before.cpu[key],
                }
                for key, count in sorted((self.messages - before.messages).items())
            },
        }


class CountingHub(Hub):
    """A hub that counts what it does."""

    last: "CountingHub"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.load, self.cause, self.clock = Load(), "", 0
        CountingHub.last = self

    def serve(self) -> None:
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        super().serve()

    def now(self) -> Load:
        """Return the load so far; for another thread."""
        self.load.thread_seconds = time.clock_gettime(self.clock)
        return self.load.copy()

    def handle(self, client: Client, message: Message) -> None:
        op, key = message.head["op"], str(message.head.get("key", "")).partition("/")[0]
        self.cause = op if op in CONTROL or "Value" in op else f"{op} {key}"
        began = time.thread_time()
        super().handle(client, message)
        self.load.cpu[self.cause] += time.thread_time() - began
        self.load.messages[self.cause] += 1

    def _admit(self, connection: Any, keys: Any) -> None:
        super()._admit(connection, keys)
        client = self.clients[connection]
        client.writer, client.reader = (
            CountingWriter(keys.of_server, self),
            CountingReader(keys.of_client, self),
        )


class CountingWriter(FrameWriter):
    """Counts the frames to a client, and their bytes."""

    def __init__(self, key: bytes, hub: CountingHub) -> None:
        super().__init__(key)
        self.hub = hub

    def frame(self, head: dict[str, Any], body: bytes = b"", *digest: bytes | None) -> bytes:
        frame = super().frame(head, body, *digest)
        self.hub.load.answers[self.hub.cause] += 1
        self.hub.load.bytes_out[self.hub.cause] += len(frame) + len(body)
        return frame


class CountingReader(FrameReader):
    """Counts the bytes from a client."""

    def __init__(self, key: bytes, hub: CountingHub) -> None:
        super().__init__(key)
        self.hub = hub

    def feed(self, data: bytes) -> Any:
        self.hub.load.bytes_in += len(data)
        return super().feed(data)


def main() -> None:
    """Run each fleet, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--model", default="deepseek-v3", help="of benchmarks.models")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--stages", type=int, default=16, help="of the trainer's pipeline")
    parser.add_argument("--engine-ranks", type=int, default=16)
    parser.add_argument("--refits", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for members in options.members:
        fleet = Fleet(options.model, members, options.engine_ranks, options.stages, options.layers)
        results.append(in_a_process(partial(run, fleet, options.refits)))
        print("\n".join(table(results[-1])), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results) + "\n", encoding="utf-8")


def in_a_process(work: Any) -> Any:
    """Return what this does in a process of its own, whose memory goes with it. Exits where that fails."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(False)
    process = context.Process(target=lambda: sends.send(work()))
    process.start()
    sends.close()
    try:
        return receives.recv()
    except EOFError:
        sys.exit(1)
    finally:
        process.join()


def run(fleet: Fleet, refits: int) -> dict[str, Any]:
    """Return what a fleet took. Its members start with what has been decoded and planned here, once for all."""
    share_work()
    sides = Sides(fleet)
    plan_ahead(sides)
    gc.freeze()
    gc.disable()
    address = free_address("127.0.0.1")
    context = multiprocessing.get_context("fork")
    # The hub, and with it the first member, has a process of its own, and so have the members that are measured.
    measured = {"trainer": 1 % fleet.trainers, "inference": fleet.trainers}
    alone = {0, *measured.values()}
    others = [rank for rank in range(fleet.members) if rank not in alone]
    shares = [[rank] for rank in sorted(alone)]
    shares += [others[i : i + MEMBERS_OF_A_PROCESS] for i in range(0, len(others), MEMBERS_OF_A_PROCESS)]
    results, barrier = context.SimpleQueue(), context.Barrier(fleet.members)
    processes = [
        context.Process(
            target=run_members, args=(fleet, sides, ranks, address, refits, results, barrier, measured)
        )
        for ranks in shares
    ]
    for process in processes:
        process.start()
    said: dict[str, Any] = {}
    while len(said) <= len(measured):
        what, value = results.get()
        if what == FAILED:
            for process in processes:
                process.terminate()
            raise RuntimeError(value)
        said[what] = value
    for process in processes:
        process.join()
    hub = said.pop("hub")
    return {"fleet": asdict(fleet), "hub": hub, "ranks": said}


def plan_ahead(sides: Sides) -> None:
    """Plan for the ranks of one engine; see `share_work`."""
    names = {rank: sides.fleet.greeting(rank).name for rank in range(sides.fleet.trainers)}
    held = {}
    for rank, trainer in enumerate(sides.trainers):
        dtypes = [str(region.tensor.dtype).removeprefix("torch.") for region in trainer.memory]
        held[rank] = receiving.unpack_held(*pack_held(trainer.tensors, dtypes), names[rank])
    far = dict.fromkeys(names, 3)  # all other hosts
    for place, engine in enumerate(sides.engines):
        receiving.plan_pieces(engine, held, names, far, place, sides.fleet.name)


def run_members(
    fleet: Fleet,
    sides: Sides,
    ranks: list[int],
    address: str,
    refits: int,
    results: Any,
    barrier: Any,
    measured: dict[str, int],
) -> None:
    """Run these members, each in a thread; the first one measures the hub, which is in its process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    threading.stack_size(STACK_BYTES)
    if len(ranks) > 1:
        sys.setswitchinterval(
            1.0
        )  # each thread that waits for Python's lock would wake every 5 ms to ask for it
    grouping.Hub = CountingHub  # type: ignore[misc]

    def run_member(rank: int) -> None:
        member, loads = Member(fleet, sides, rank, address), []
        for step in (member.meet, member.connect, *[member.refit] * refits):
            barrier.wait()  # so that no message of a step is counted as one of another
            before = CountingHub.last.now() if loads else Load()
            barrier.wait()
            step()
            barrier.wait()
            if rank == 0:
                loads.append(CountingHub.last.now().since(before))
        member.leave()
        if rank == 0:
            results.put(("hub", by_step(loads)))
        for side, of_side in measured.items():
            if rank == of_side:
                refitting = {"a refit": member.seconds.pop("refits", 0.0) / max(1, refits)}
                results.put((side, member.seconds | refitting))

    def run_or_tell(rank: int) -> None:
        try:
            run_member(rank)
        except BaseException:
            results.put((FAILED, traceback.format_exc()))

    names = [MEASURED if rank in measured.values() else f"member {rank}" for rank in ranks]
    threads = [
        threading.Thread(target=run_or_tell, args=(rank,), name=name)
        for rank, name in zip(ranks, names, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_step(loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the hub's load by step; of refits that of the one with the median of CPU time."""
    met, connected, *refits = loads
    steps = {"meeting": met, "connect": connected}
    if refits:
        steps["refit"] = sorted(refits, key=lambda refit: refit["hub_cpu"])[len(refits) // 2]
    return steps


def table(result: dict[str, Any]) -> list[str]:
    """Return a fleet's result as lines of text."""
    fleet = Fleet(**result["fleet"])
    lines = [
        f"{fleet.name}: {fleet.members:,} members: {fleet.trainers:,} trainer's ranks, {fleet.engines} engines of "
        f"{fleet.engine_ranks}",
        f"  {'':10}{'messages':>12}{'answers':>12}{'MB in':>10}{'MB out':>10}{'hub s':>10}{'wall s':>10}",
    ]
    for step, load in result["hub"].items():
        lines.append(
            f"  {step:10}{load['messages']:>12,}{load['answers']:>12,}{load['bytes_in'] / 1e6:>10,.1f}"
            f"{load['bytes_out'] / 1e6:>10,.1f}{load['hub_cpu']:>10.3f}{load['wall']:>10.2f}"
        )
    for step in ("connect", "refit"):
        by_message = result["hub"].get(step, {"by_message": {}})["by_message"]
        heaviest = sorted(by_message.items(), key=lambda item: -item[1]["cpu"])[:8]
        lines += [
            f"    {step}: {key:20}{of_key['messages']:>10,}{of_key['bytes_out'] / 1e6:>10,.1f} MB out"
            f"{of_key['cpu']:>10.3f} s"
            for key, of_key in heaviest
        ]
    for side, parts in result["ranks"].items():
        lines.append(f"  CPU seconds of a rank, {side}:")
        lines += [f"    {part:42}{seconds:>9.3f}" for part, seconds in parts.items()]
    return lines


if __name__ == "__main__":
    main()
