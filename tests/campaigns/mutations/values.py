"""Values and bytes that spoil any kind of file."""

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUGE_BYTES = 3 << 30
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**9,
    10**18, 10**400, 0.5, 1.5, -1.5, 1e308, float("nan"), float("inf"),
]  # fmt: skip
VALUES: list[Any] = [*NUMBERS, None, True, False, "", "1", "²", "\u0661", "nan", "x" * 5000, "../../etc/passwd", "\0",
                     "\ud800", [], {}, [[]], [0], [1, 2, 3, 4, 5], [-1], ["a"], {"a": 1}, {"": None}, [None] * 40,
                     [2] * 2000]  # fmt: skip

Mutation = Callable[[random.Random, Path], str]


def extreme(rng: random.Random, value: Any) -> Any:
    """Something that may stand where `value` stood: often a number near it, sometimes another kind of
    thing."""
    if type(value) is int and rng.random() < 0.5:
        return rng.choice(
            [
                value + 1,
                value - 1,
                -value,
                value * 2,
                value // 2,
                value * 10**9,
                float(value),
                str(value),
                bool(value),
            ]
        )
    return copy.deepcopy(rng.choice(VALUES))


def raw(rng: random.Random, path: Path) -> str:
    """Damage that knows nothing of the format."""
    how = rng.choice(
        [
            "truncated",
            "emptied",
            "bytes",
            "bytes",
            "bytes",
            "grown",
            "sparse",
            "removed",
            "directory",
            "pipe",
            "link",
            "cut",
            "zeros",
        ]
    )
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "bytes":
        spoiled = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            if spoiled:
                spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
        path.write_bytes(spoiled)
    elif how == "grown":
        path.write_bytes(data + rng.randbytes(rng.choice([1, 100, 5000])))
    elif how == "sparse":
        os.truncate(path, HUGE_BYTES)
    elif how == "cut":
        a = rng.randrange(len(data) + 1)
        path.write_bytes(data[:a] + data[a + rng.choice([1, 7, 64]) :])
    elif how == "zeros":
        a = rng.randrange(len(data) + 1)
        n = min(rng.choice([1, 64, 5000]), len(data) - a)
        path.write_bytes(data[:a] + bytes(n) + data[a + n :])
    else:
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "link":
            path.symlink_to(path.with_name("nowhere"))
    return how
