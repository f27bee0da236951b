"""Messages of connects and refits between real models on the CPU, spoiled on their way: what every
member says then, and what the engine holds."""

import json
import random
import resource
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.engines.vllm.live import VllmModel
from reshard.refit import connect
from reshard.trainers.megatron import MegatronModel
from tests.campaigns.mutations.values import extreme
from tests.on_cpu.refit_on_cpu import engine_of
from tests.tools.refit_sides import Steps, fingerprint, start, trainer

MEMORY_BYTES = 2 << 30  # that a member may need beside what it has when both sides are built
BOMB_BYTES = 3 << 30
ROWS = [
    -1,
    1,
    -2,
    2,
    3,
    128,
    -128,
    1 << 20,
    1 << 31,
    1 << 32,
    1 << 47,
    1 << 62,
    -(1 << 62),
    (1 << 63) - 1,
    -(1 << 63),
]
# Every message by its key, and who posts it.
TRAINERS, ENGINES = (
    ("parts", "held", "regions", "memory", "asked", "slab", "packed", "digests"),
    ("model", "pieces", "taken"),
)
BOTH = ("hello", "device", "partners", "rounds", "note")


def spoiled(
    rank: int,
    sides: dict,
    flags: list[str],
    checkpoint: tuple[str, str],
    engine: dict,
    how: dict,
    seed: int,
    count: int,
):
    """Connect and refit `count` times, with one message spoiled each time; then once with none.

    Of each time: the message and what was done to it, what this member says (``right`` where
    nothing), whether that is a ReshardError's, seconds, and of an engine's rank what it holds:
    ``right``, ``untouched``, or something else, and whether it is fit.
    """
    is_trainer, is_engine, members = start(rank, sides)
    size = sides["trainer"] if sides.get("together") else sides["trainer"] + sides["engine"]
    steps = Steps(sides, rank, size)
    source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
    destination = VllmModel(*engine_of(checkpoint[0], load_format="dummy", **engine)) if is_engine else None
    steps.meet("built")  # a side may take longer to build than a member waits for another
    # before memory is short
    connect(members, source, destination, **how).refit(verify=True)
    right = fingerprint(destination.module) if destination else None
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_BYTES, limit[1]))
    said = []
    for number in range(count + 1):
        rng = random.Random(f"{seed} {number}")
        spoiler = Spoiler(rng, members, sides, size, "delta" in how) if number < count else None
        if destination:
            _spoil(destination)
        before = fingerprint(destination.module) if destination else None
        steps.meet(f"number {number}")
        began, verify = time.monotonic(), rng.random() < 0.5
        what = "right"
        try:
            if spoiler:
                spoiler.begin()
            link = connect(members, source, destination, **how)
            if source:
                _move(source)
            link.refit(version=number + 1, verify=verify)
        except ReshardError as error:
            what = f"refused: {error}"
        except BaseException as error:
            what = f"CRASH {type(error).__name__}: {error} {traceback.format_exc()[-1500:]}"
        finally:
            if spoiler:
                spoiler.end()
        took = time.monotonic() - began
        link = None
        steps.meet(f"end {number}")
        holds = None
        if destination:
            now = fingerprint(destination.module)
            holds = "right" if now == right else "untouched" if now == before else "other"
            holds = holds, destination.ready
        with (steps.folder / f"said {rank}").open("a") as log:  # for who looks while it goes on
            print(
                number, spoiler.said if spoiler else "nothing", what[:600], f"{took:.1f} s", holds, file=log
            )
        said.append((spoiler.said if spoiler else "nothing", what, took, holds))
    return said


def _spoil(destination: VllmModel) -> None:
    """Leave nothing in the engine that a refit has brought."""
    with torch.no_grad():
        for region in (
            *destination.regions.values(),
            *(scales.region for scales in destination.scales.values()),
        ):
            region.tensor.view(torch.uint8).fill_(0x2D)


def _move(source: MegatronModel) -> None:
    """Give a parameter new memory, so that the refit says anew what lies where."""
    parameter = next(iter(source.models[0].parameters()))
    old, parameter.data = parameter.data, parameter.data.clone()
    old.fill_(-77.0)


def _data_bytes() -> int:
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")
    ]
    return int(line.split()[1]) << 10


class Spoiler:
    """Spoils one message of one member, the same on all that draw it: `said` is which, and how."""

    def __init__(
        self, rng: random.Random, members: RefitGroup, sides: dict, size: int, with_deltas: bool
    ) -> None:
        self.rng, self.members, self.seen = rng, members, 0
        both = (*BOTH, "delta") if with_deltas else BOTH
        kind = rng.choice([*both, *TRAINERS, *ENGINES, "pieces", "pieces", "parts", "regions", "memory"])
        trainers = range(sides["trainer"])
        engines = trainers if sides.get("together") else range(sides["trainer"], size)
        self.kind, self.victim = (
            kind,
            rng.choice([*(() if kind in ENGINES else trainers), *(() if kind in TRAINERS else engines)]),
        )
        # Some are said again, of the second partner or at the refit.
        self.seed, self.which = (
            rng.random(),
            rng.choice([1, 2]) if kind in ("pieces", "regions", "memory", "slab", "packed") else 1,
        )
        self.said = f"{kind} of rank {self.victim}"

    def begin(self) -> None:
        if self.members.rank != self.victim:
            return
        rng, post, gather = random.Random(self.seed), self.members.post, self.members.gather
        prepare, post_all = self.members.prepare, self.members.post_all

        def changed(key: str, payload: bytes) -> bytes:
            if key.partition("/")[0] == self.kind:
                self.seen += 1
            if key.partition("/")[0] == self.kind and self.seen == self.which and "," not in self.said:
                payload, how = spoil(rng, self.kind, payload)
                self.said += f", {key}: {how}"
            return payload

        def note(version: int | None = None, note: str = "", verify: bool = False, anew: bool = False) -> int:
            if self.kind == "note":
                note = rng.choice(["", "moved", "a b c", "\u0661", "x" * 5000, "{}", "\n"])
                self.said += f": {note!r:.60}"
            return prepare(version, note, verify, anew)

        self.members.post = lambda key, payload=b"": post(key, changed(key, payload))
        self.members.post_all = lambda payloads: post_all(
            {key: changed(key, p) for key, p in payloads.items()}
        )
        self.members.gather = lambda key, payload: gather(key, changed(key, payload))
        self.members.prepare = note

    def end(self) -> None:
        for name in ("post", "post_all", "gather", "prepare"):
            vars(self.members).pop(name, None)


def spoil(rng: random.Random, kind: str, payload: bytes) -> tuple[bytes, str]:
    """A message that is not what was said, and what was done to it."""
    ways: list[Callable[[random.Random, bytes], tuple[bytes, str]]] = [_bytes]
    if kind in ("hello", "device", "model", "held", "memory", "partners", "rounds", "slab", "delta"):
        ways += [_json] * 9
    elif kind in ("parts", "pieces", "regions", "asked"):
        ways += [_matrix] * 12
    return rng.choice(ways)(rng, payload)


def _bytes(rng: random.Random, payload: bytes) -> tuple[bytes, str]:
    data = bytearray(payload)
    how = rng.choice(["nothing", "truncated", "flipped", "grown", "noise", "bomb", "text"])
    if how == "truncated":
        data = data[: rng.randrange(len(data) + 1)]
    elif how == "flipped":
        for _ in range(rng.randint(1, 4)):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "grown":
        data += rng.randbytes(rng.randint(1, 64))
    elif how == "noise":
        data = bytearray(rng.randbytes(rng.randint(1, 200)))
    elif how == "bomb":
        head = rng.choice([b"", data[:8]])
        data = bytearray(head + _bomb())
    else:
        data = bytearray(
            rng.choice([b"", b"-", b"1", b"-5", b"9" * 30, "\u0661".encode(), b"nan", b"\xff\xfe"])
        )
    return bytes(data), how


def _bomb() -> bytes:
    """The beginning of a message that would take `BOMB_BYTES`, in fewer bytes than torch's store takes."""
    packer, text = zlib.compressobj(9), b"[" * (4 << 20)
    first = packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(text) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + again * (BOMB_BYTES // len(text))


def _json(rng: random.Random, payload: bytes) -> tuple[bytes, str]:
    value = json.loads(zlib.decompress(payload))
    if rng.random() < 0.05:
        text, how = "[" * 200_000 + "]" * 200_000, "deep"
    else:
        value, how = _changed(rng, value)
        text = json.dumps(value)
    return zlib.compress(text.encode("utf-8", "surrogatepass")), how


def _changed(rng: random.Random, value: Any) -> tuple[Any, str]:
    """The same value but for one place in it."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}, f"without {key}"
        value[key], how = _changed(rng, value[key])
        return value, f"{key}.{how}"
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:index] + value[index + 1 :], f"without {index}"
        if rng.random() < 0.15:
            other = rng.randrange(len(value))
            value[index], value[other] = value[other], value[index]
            return value, f"{index} and {other} swapped"
        value[index], how = _changed(rng, value[index])
        return value, f"{index}.{how}"
    new = extreme(rng, value)
    return new, f"{value!r:.40} becomes {new!r:.40}"


def _matrix(rng: random.Random, payload: bytes) -> tuple[bytes, str]:
    """A matrix, perhaps after eight bytes of something else, changed in a number or two, or in its shape."""
    start = next((at for at in (0, 8) if _is_matrix(payload[at:])), None)
    if start is None:
        return _bytes(rng, payload)
    columns = int(np.frombuffer(payload[start : start + 8], np.int64)[0])
    matrix = np.frombuffer(zlib.decompress(payload[start + 8 :]), np.int64).reshape(-1, columns).copy()
    how = rng.choice(["number"] * 6 + ["other"] * 4 + ["rows", "swapped", "doubled", "columns", "float"])
    if not len(matrix):
        matrix, how = np.full((rng.randint(1, 3), columns), rng.choice([0, 1, *ROWS])), "from nothing"
    elif how == "number":
        row, column = rng.randrange(len(matrix)), rng.randrange(columns)
        number = rng.choice(ROWS)
        with np.errstate(over="ignore"):
            matrix[row, column] += np.int64(number)
        how = f"{row}, {column} by {number}"
    elif how == "other":
        row, other, column = rng.randrange(len(matrix)), rng.randrange(len(matrix)), rng.randrange(columns)
        matrix[row, column] = matrix[other, column]
        how = f"{row}, {column} as in {other}"
    elif how == "rows":
        row = rng.randrange(len(matrix))
        matrix = np.delete(matrix, row, 0)
        how = f"without {row}"
    elif how == "swapped":
        row, other = rng.randrange(len(matrix)), rng.randrange(len(matrix))
        matrix[[row, other]] = matrix[[other, row]]
        how = f"{row} and {other} swapped"
    elif how == "doubled":
        matrix = np.concatenate([matrix, matrix[: rng.randint(1, len(matrix))]])
    elif how == "columns":
        columns = rng.choice([0, 1, columns - 1, columns + 1, -1, 2, 1 << 40, -(1 << 63)])
        if columns == matrix.shape[1] - 1:
            matrix = matrix[:, :-1]
        how = f"{columns} columns"
    else:
        matrix = matrix.astype(np.float64).view(np.int64)
    packed = zlib.compress(np.ascontiguousarray(matrix).tobytes())
    return payload[:start] + np.int64(columns).tobytes() + packed, how


def _is_matrix(payload: bytes) -> bool:
    try:
        columns = int(np.frombuffer(payload[:8], np.int64)[0])
        return 0 < columns < 100 and len(zlib.decompress(payload[8:])) % (8 * columns) == 0
    except (ValueError, IndexError, zlib.error):
        return False
