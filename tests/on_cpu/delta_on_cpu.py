"""Deltas of live Megatron models, written by all ranks, into vLLM's real model classes on the same ranks."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError
from reshard.delta import Chain, apply_deltas, roll_back, stores
from reshard.engines.vllm.live import VllmModel
from reshard.engines.workers.deltas import EngineDeltas
from reshard.live.delta_writer import DeltaWriter
from reshard.trainers import FsdpModel
from tests.on_cpu.fsdp_on_cpu import copy_shards, sharded
from tests.on_cpu.refit_on_cpu import engine_of, loaded
from tests.starting.ranks import caught
from tests.tools.chains import Workers
from tests.tools.refit_sides import fingerprint, trainer


def go_back(rank: int, workers: Workers, chain: str) -> dict:
    """Have an engine that serves version 30, and came there from 20, go back and forward again, and meet what keeps it
    from that; what is said, and what it serves then."""
    side, emptied, served = workers.side, workers.emptied, []
    first, last = workers.first, {name: tensor.clone() for name, tensor in side.module.state_dict().items()}

    def load(weights: dict[str, torch.Tensor]) -> None:
        """Load weights behind the engine's back, as trainers do."""
        side.guard.altered()
        with torch.no_grad():
            for name, tensor in side.module.state_dict().items():
                tensor.copy_(weights[name])

    def serving() -> tuple:
        return fingerprint(side.module), side.version, side.ready

    def said(version: int | None = None) -> tuple[str, bool]:
        """What is said of a way back, and whether it serves on as before."""
        before = serving()
        return caught(lambda: roll_back(workers, version)), serving() == before

    outcome = {"another": said(10)}
    served.append((roll_back(workers), *serving()))
    outcome["emptied"] = workers.emptied - emptied
    outcome["twice"] = said()
    served.append((apply_deltas(workers, chain, verify=True), *serving()))
    served.append((roll_back(workers, 20), *serving()))
    apply_deltas(workers, chain, pending_bytes=64)
    outcome["too large"] = said()
    load(first)
    apply_deltas(workers, chain)  # three versions at once, which share elements
    assert "is not a chain" in caught(lambda: apply_deltas(workers, f"{chain}-not"))
    served.append((roll_back(workers), *serving()))
    apply_deltas(workers, chain)
    if rank == 0:
        side.guard.altered()
    outcome["of one rank"] = said()
    load(first)
    apply_deltas(workers, chain)
    parameter = next(iter(side.regions.values())).tensor.data
    parameter += 1
    outcome["in place"] = said()
    load(last)
    assert apply_deltas(workers, chain, 30) == 30 and "keeps no version" in said()[0], "nothing was written"
    load(first)
    apply_deltas(workers, chain)
    plain = side.update_derived
    if rank == dist.get_world_size() - 1:
        side.update_derived = fail
    outcome["half"] = caught(lambda: roll_back(workers)), side.ready
    side.update_derived = plain
    load(last)
    side.guard.refitted(30)
    workers.emptied = emptied
    return outcome | {"served": served}


def fail() -> None:
    raise ReshardError("a GPU is gone")


def move(rank: int, path: Path, to: Path) -> None:
    """Move a file or directory while no rank uses it."""
    dist.barrier()
    if not rank:
        shutil.move(path, to)
    dist.barrier()


def follow_second(writer: DeltaWriter, workers: Workers, chain: str, loads: list) -> list[tuple[int, str]]:
    """Follow a chain that begins where an earlier one in its place ends, with versions of that one but other
    weights; the versions, and what the engine holds of each."""
    held = []
    for number, load in enumerate(loads, 1):
        load()
        writer.save(10 * number)
        held.append((apply_deltas(workers, chain), fingerprint(workers.side.module)))
    return held


def calls_that_lead_nowhere(workers: Workers, chain: str) -> tuple[str, str, int]:
    """Ask a worker for a chain that is not there, for a version with other weights than the chain has, and for
    one that another worker could not prepare; the first two answers, and what is left of the third."""
    absent = [workers.reshard_delta_digests(f"{chain}-not", "a")["error"] for _ in range(2)][-1]
    boxes = workers.reshard_delta_digests(chain, "b")
    with Chain(chain) as opened:
        held, after = opened.deltas()[-1].before, opened.deltas()[-1].after
    assert workers.reshard_delta_prepare("b", held, 40, "0" * 16) is None
    replaced = workers.reshard_delta_prepared("b", True)["error"]
    assert (
        "another call of apply_deltas has begun"
        in workers.reshard_delta_prepare("a", held, 40, after)["error"]
    )
    assert workers.reshard_delta_prepare("b", held, 40, after) is None
    assert workers.reshard_delta_prepared("b", True) == [True] and workers._reshard_deltas.prepared
    workers.side.guard.altered()
    written = workers.reshard_delta_write("b", 40, after)
    assert (
        "others have written or moved weights of this vLLM since" in written["error"] and written["untouched"]
    )
    assert workers.reshard_delta_digests(chain, "d") == boxes
    assert workers.reshard_delta_prepare("d", held, 40, after) is None
    early = workers.reshard_delta_write("d", 40, after)["error"]
    assert workers.reshard_delta_digests(chain, "c") == boxes, "though that was not read yet"
    assert "version 40 of" in early and "was not prepared: call apply_deltas" in early
    return absent, replaced, len(workers._reshard_deltas.prepared)


def overtake(rank: int, writer: DeltaWriter, folder: Path) -> tuple[str, bool]:
    """Save while another process adds a version to a chain that cannot be locked; what is said, and whether all
    of its files are as that one left them."""
    before, write = contents(folder), writer._write

    def meanwhile(*arguments):
        if not rank:
            (folder / "delta-000035.json").touch()
        return write(*arguments)

    writer._write = meanwhile
    said = caught(lambda: writer.save(40))
    writer._write = write
    dist.barrier()
    if not rank:
        (folder / "delta-000035.json").unlink()
    dist.barrier()
    return said, contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def write_chain(
    rank: int, mesh: dict[str, int], checkpoints: list[str], chain: str
) -> tuple[str, list[float]]:
    """Add the second of two checkpoints to a chain that begins with the first, and the first again, from a model in
    fp32 whose chain is in bf16; what is said of a chain in its own dtype, and the density of each version."""
    model = sharded(checkpoints[0], mesh, torch.float32)
    wrong = caught(lambda: DeltaWriter(FsdpModel(model), checkpoints[0], chain, dtype="bf17"))
    writer = DeltaWriter(FsdpModel(model), checkpoints[0], chain, dtype="bf16")
    densities = []
    for number in (1, 0):
        copy_shards(sharded(checkpoints[number], mesh, torch.float32), model)
        densities.append(writer.save().density)
    assert writer.kept_bytes * dist.get_world_size() < 1.1 * 2 * sum(p.numel() for p in model.parameters())
    return wrong, densities


def model_of(steps: list[tuple[str, str]], flags: list[str] | None) -> tuple:
    """A model that holds the first of some checkpoints, under FSDP2 or, with flags, Megatron's; and a function that
    loads another of them into the same memory."""
    if flags is not None:
        chunks, load = trainer(flags, steps[0][1])
        return chunks, lambda step: load(steps[step][1])
    mesh = {"shard": dist.get_world_size()}
    model = sharded(steps[0][0], mesh)
    return FsdpModel(model), lambda step: copy_shards(sharded(steps[step][0], mesh), model)


@contextmanager
def publishing(act: Callable[[str], None]) -> Iterator[None]:
    """Have this rank act, by its name, before each file that gets its name in a chain."""
    plain = stores.LocalStore.put

    def put(store: stores.LocalStore, path: Path, name: str) -> None:
        act(name)
        plain(store, path, name)

    stores.LocalStore.put = put  # type: ignore[method-assign]
    try:
        yield
    finally:
        stores.LocalStore.put = plain  # type: ignore[method-assign]


@contextmanager
def full_disk(is_full: bool) -> Iterator[None]:
    """Have this rank's disk say that it is full when a file of a chain is to be on it."""
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if is_full and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor)

    os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = plain


def save_behind(rank: int, steps: list[tuple[str, str]], flags: list[str] | None, chain: str) -> dict:
    """Save versions while the trainer goes on: one whose weights are others before its first file is there, two at
    once, and some that fail on the last rank alone; what is said, and what the chain holds then."""
    model, load = model_of(steps, flags)
    writer, folder, last = DeltaWriter(model, steps[0][0], chain), Path(chain), dist.get_world_size() - 1
    go_on = threading.Event()
    load(1)
    with publishing(lambda _: go_on.wait()):
        begun = writer.begin_save(10)
        load(2)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)  # the trainer's own, while the version waits to be written
        outcome = {"ranks": int(ranks), "early": begun.is_done, "files": sorted(contents(folder))}
        dist.barrier()  # all have looked
        go_on.set()
        outcome["report"] = begun.wait().to_dict()
    outcome["again"] = begun.wait().to_dict() == outcome["report"] and begun.is_done
    first, second = writer.begin_save(20), None
    load(3)
    second = writer.begin_save()
    load(0)
    outcome["first is there"] = first.is_done
    outcome["at once"] = [one.wait().version for one in (first, second)]
    before = contents(folder)
    with full_disk(rank == last):
        begun = writer.begin_save(30)
        load(2)
        outcome["full"] = caught(begun.wait)
        dist.barrier()  # all have removed what they wrote
        outcome["after full"] = contents(folder) == before
        dist.barrier()
        begun = writer.begin_save(30)
        if not rank:
            caught(begun.wait)
        outcome["not waited for"] = caught(lambda: writer.save(30))
    dist.barrier()
    outcome["after that"] = contents(folder) == before
    dist.barrier()
    outcome["lower"] = caught(writer.begin_save(20).wait)
    outcome["then"] = writer.save(30).version
    load(1)
    unheard = writer.begin_save(40)
    writer.close()
    outcome["closed"] = unheard.is_done and unheard.wait().version, caught(writer.begin_save)
    return outcome


def save_behind_and_die(rank: int, steps: list[tuple[str, str]], chain: str) -> tuple[str, str] | None:
    """Save a version whose last rank dies before its file is there; what the first says of it, and what is there."""
    model, load = model_of(steps, None)
    writer = DeltaWriter(model, steps[0][0], chain)
    load(1)

    def die(_: str) -> None:
        if rank:
            os._exit(0)

    dist.barrier = lambda *_: None  # one is gone
    with publishing(die):
        begun = writer.begin_save()
        return caught(begun.wait), sorted(contents(Path(chain)))


def save_unheard(rank: int, steps: list[tuple[str, str]], chain: str) -> list[str]:
    """Save a version of which the last rank cannot keep what it has written, though it is there; what all say of that,
    and of the next one."""
    model, load = model_of(steps, None)
    writer = DeltaWriter(model, steps[0][0], chain)
    load(1)
    begun, said = writer.begin_save(), []
    begun.settle()
    load(2)

    def fail(*_: object) -> None:
        raise ReshardError("no memory")

    plain, writer._keep = writer._keep, fail if rank else writer._keep
    said.append(caught(writer.begin_save().wait))
    writer._keep = plain
    return [*said, caught(writer.save), caught(writer.save)]


def follow(rank: int, flags: list[str], steps: list[tuple[str, str]], engine: dict, chain: str):
    """Write a version for each step after the first, by all ranks of a trainer that loads them in turn, and
    follow it with an engine that has loaded the first: two at once, then one, then none where one is lost."""
    chunks, load = trainer(flags, steps[0][1])
    writer = DeltaWriter(chunks, steps[0][0], chain)
    module, config = engine_of(steps[0][0], **engine)
    side = VllmModel(module, config)
    workers, reports, held = Workers(side), [], {}
    workers.first = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    nothing_yet = caught(lambda: roll_back(workers))
    for number, (_, mcore) in enumerate(steps[1:], 1):
        load(mcore)
        reports.append(writer.save(number * 10).to_dict())
        if number > 1:
            reached = apply_deltas(workers, chain, verify=True)
            held[reached] = fingerprint(module), side.version, workers.emptied, side.ready
    same = apply_deltas(workers, chain)
    back = go_back(rank, workers, chain) | {"nothing yet": nothing_yet}
    folder = Path(chain.removeprefix("file://"))
    begun_anew = []
    if engine == {"tp": 2}:
        move(rank, folder, folder.parent / "first")
        second = DeltaWriter(chunks, steps[0][0], chain, base=steps[-1][0])
        begun_anew = follow_second(second, workers, chain, [lambda n=n: load(steps[n][1]) for n in (2, 3)])
        move(rank, folder, folder.parent / "second")
        move(rank, folder.parent / "first", folder)
    again = caught(lambda: DeltaWriter(chunks, steps[0][0], chain).save(20))
    load(steps[0][1])
    behind = caught(lambda: DeltaWriter(chunks, steps[0][0], chain))
    overtaken = overtake(rank, writer, folder) if chain.startswith("file://") else None
    writer.save(40)
    move(rank, folder / "delta-000030.json", folder.parent / "delta-000030.json")
    lost = caught(lambda: apply_deltas(workers, chain)), side.ready, fingerprint(module) == held[30][0]
    move(rank, folder.parent / "delta-000030.json", folder / "delta-000030.json")
    calls = calls_that_lead_nowhere(workers, chain)
    side.begin()
    half = caught(lambda: apply_deltas(workers, chain))
    side.guard.refitted(1)
    parameter = next(iter(side.regions.values())).tensor.data.view(-1)
    kept = parameter[:1].clone()
    parameter[0] += 1
    strange = caught(lambda: apply_deltas(workers, chain))
    parameter[:1] = kept
    healed = apply_deltas(workers, chain, verify=True), fingerprint(module)
    unchanged = (
        writer.save(45).changed,
        apply_deltas(workers, chain),
        side.version,
        workers.emptied - len(begun_anew),
    )
    load(steps[1][1])
    writer.save(50)
    plain, left = EngineDeltas._placed, [True]
    EngineDeltas._placed = lambda *of: [] if left and left.pop() else plain(*of)
    withheld = caught(lambda: apply_deltas(workers, chain, verify=True)), side.ready
    refused = []
    for options in ({"quantization": "fp8_per_channel"}, {"dtype": "float16"}) if engine == {"tp": 2} else ():
        other = Workers(VllmModel(*engine_of(steps[0][0], **engine, **options)))
        refused.append(caught(lambda other=other: apply_deltas(other, chain)))
    expected = {10 * number: loaded(steps[number][0], **engine) for number in (0, 2, 3)}
    return {
        "held": held,
        "expected": expected,
        "reports": reports,
        "kept_bytes": writer.kept_bytes,
        "same": same,
        "back": back,
        "overtaken": overtaken,
        "begun_anew": not begun_anew or begun_anew == [(v - 10, expected[v]) for v in (20, 30)],
        "again": again,
        "behind": behind,
        "lost": lost,
        "calls": calls,
        "half": half,
        "strange": strange,
        "healed": (healed[0], healed[1] == expected[0]),
        "withheld": withheld,
        "unchanged": unchanged,
        "refused": refused,
    }
