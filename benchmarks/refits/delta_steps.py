"""What a delta of one bucket costs on a GPU, step by step, beside the memory that each step must read.

    python -m benchmarks.refits.delta_steps [--mib 128] [--fractions 0.001 0.01 0.05 0.2 1] [--rounds 7] [--json FILE]

A bucket of random words of which some have changed is compared with what was sent, encoded, decoded, and written
to rows of an engine's memory. First all of it must have the bits that `reshard.delta.encoding` makes of one
chunk after the other on the CPU, at odd sizes, in every form, three times over: a difference that comes and goes
is a race. Then medians in ms, beside the floor, which is both versions read once at the rate at which a copy
reads, and beside the same steps chunk by chunk on the GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.processes import device
from reshard.delta.chunks import CHUNK, WORD, ChunkSizes, Comparison, Words, decode_chunks, encode_chunks
from reshard.delta.encoding import decode, encode
from reshard.refit.codecs import codec_between
from reshard.refit.tables import CODEC, COLUMNS, DST, DST_PITCH, ROWS, SRC, WIDTH
from reshard.refit.transports.changes import ServedBucket

SIZES = [8, 4096 + 8, CHUNK - 8, CHUNK, CHUNK + 8, 5 * CHUNK + 24, 12 * CHUNK + 65536 + 8]  # words
FRACTIONS = [0.0, 1e-5, 0.001, 0.02, 0.2, 0.6, 0.99, 1.0]
ROW = 1000  # words of a row of the engine's memory
AS_WORD = torch.int16


def versions(words: int, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words of random bits, and a version in which about this share of them has others."""
    generator = torch.Generator(device()).manual_seed(seed)
    old = torch.randint(-(1 << 15), 1 << 15, (words,), dtype=AS_WORD, device=device(), generator=generator)
    chosen = torch.rand(words, device=device(), generator=generator) < fraction
    # Chunks of all densities in one bucket, so that it has chunks of all forms.
    if words > 8 * CHUNK:
        chosen[: 2 * CHUNK] = False
        chosen[CHUNK // 2] = True
        chosen[2 * CHUNK : 3 * CHUNK] = True
    return old, torch.where(chosen, old ^ (1 << 3), old)


def encoded(old: torch.Tensor, new: torch.Tensor) -> tuple[ChunkSizes, torch.Tensor]:
    """Return the changes of all chunks."""
    return encoded_of(Comparison.of(old, new))


def encoded_of(compared: Comparison) -> tuple[ChunkSizes, torch.Tensor]:
    """Return the changes that a comparison found."""
    sizes = ChunkSizes.of(len(compared.words), compared.changed.cpu().numpy())
    payload = torch.zeros(sizes.total, dtype=torch.uint8, device=compared.words.device)
    encode_chunks(compared, sizes, payload)
    return sizes, payload


def decoded(payload: torch.Tensor, sizes: ChunkSizes) -> list[Words]:
    """Return all changes."""
    groups = list(decode_chunks(payload, sizes))
    assert None not in groups, "the changes make no sense"
    return [words for group in groups for words in group or ()]


def rows_for(words: int, codec: int = 0, row: int = 2 * ROW) -> tuple[torch.Tensor, ServedBucket]:
    """Return memory, in bytes, with rows of `row` bytes that a bucket of so many words is served from, and how to
    write there. With a codec each word becomes two."""
    factor = 2 if codec else 1
    (rows, rest), pitch = divmod(words * WORD, row), factor * row + 48 + row % 2
    memory = torch.zeros((rows + 1, pitch), dtype=torch.uint8, device=device())
    table = np.zeros((2, COLUMNS), np.int64)
    table[:, CODEC] = codec
    last = memory.data_ptr() + rows * pitch
    table[0, [SRC, DST, ROWS, WIDTH, DST_PITCH]] = 0, memory.data_ptr(), rows, factor * row, pitch
    table[1, [SRC, DST, ROWS, WIDTH, DST_PITCH]] = rows * row, last, 1, factor * rest, factor * rest
    return memory, ServedBucket(table[table[:, ROWS] * table[:, WIDTH] > 0], memory.device)


def in_rows(memory: torch.Tensor, size: int, row: int) -> torch.Tensor:
    """Return the bytes that lie in rows, and check that nothing lies between them."""
    assert not memory[:, row:].any(), "bytes between rows"
    return memory[:, :row].reshape(-1)[:size]


def check() -> int:
    """Compare each step with the CPU's, chunk by chunk; return the number of cases."""
    cases = 0
    for words in SIZES:
        for fraction in FRACTIONS:
            old, new = versions(words, fraction, words)
            pairs = zip(old.cpu().split(CHUNK), new.cpu().split(CHUNK), strict=True)
            expected = torch.cat([encode(*pair).payload for pair in pairs])
            # Plain, cast, and byte by byte.
            for codec, row in (
                (0, 2 * ROW),
                (codec_between("bfloat16", "float32"), 2 * ROW),
                (0, 2 * ROW - 1),
            ):
                for _ in range(3):
                    sizes, payload = encoded(old, new)
                    assert torch.equal(payload.cpu(), expected), f"{words} words, {fraction}: encoded"
                    memory, served = rows_for(words, codec, row)
                    served.write(torch.arange(words, device=old.device), old)
                    for changes in decoded(payload, sizes):
                        served.write(*changes)
                    there = (new.view(torch.bfloat16).float() if codec else new).view(torch.uint8)
                    written = in_rows(memory, len(there), row * (2 if codec else 1))
                    assert torch.equal(written, there), f"{words} words, {fraction}, {row}: written"
                    before = (old.view(torch.bfloat16).float() if codec else old).view(torch.uint8)
                    assert torch.equal(written, before) == (not len(expected)), "the control"
                cases += 1
    return cases


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Return the median of what a step takes, from its call to the GPU being done."""
    times = []
    for _ in range(rounds + 2):
        if device() == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device() == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def chunk_by_chunk(old: torch.Tensor, new: torch.Tensor) -> None:
    """Encode each chunk by itself."""
    for pair in zip(old.split(CHUNK), new.split(CHUNK), strict=True):
        encode(*pair)


def times(words: int, fraction: float, rounds: int) -> dict[str, float]:
    """Return the ms of each step of a bucket."""
    old, new = versions(words, fraction, 1)
    compared = Comparison.of(old, new)
    sizes, payload = encoded_of(compared)
    changes, (_, served) = decoded(payload, sizes), rows_for(words)
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    copied = milliseconds(lambda: old.copy_(old.clone()), rounds) / 2  # reads and writes as much as two reads
    result = {
        "fraction": fraction,
        "payload_mb": len(payload) / 1e6,
        "floor_reads": copied,
        "compare": milliseconds(lambda: Comparison.of(old, new).changed.cpu(), rounds),
        "encode": milliseconds(lambda: encoded_of(compared), rounds),
        "decode": milliseconds(lambda: decoded(payload, sizes), rounds),
        "write": milliseconds(lambda: [served.write(*words) for words in changes], rounds),
        "chunk_by_chunk": milliseconds(lambda: chunk_by_chunk(old, new), 2),
        "chunk_by_chunk_decode": milliseconds(lambda: [decode(encode(a, b), len(a), a.dtype) for a, b in
                                                       zip(old.split(CHUNK), new.split(CHUNK), strict=True)], 2),
    }  # fmt: skip
    if device() == "cuda":
        result["extra_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return result


def main() -> None:
    """Check, measure, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="of a bucket")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.2, 1.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict = {"gpu": torch.cuda.get_device_name() if device() == "cuda" else "none", "mib": options.mib}
    if not options.skip_check:
        result["checked"] = check()
        print(f"{result['checked']} cases have the bits that they should", flush=True)
    words = options.mib << 19
    result["buckets"] = [times(words, fraction, options.rounds) for fraction in options.fractions]
    columns = list(result["buckets"][0])
    print(" ".join(f"{name:>12.12}" for name in columns))
    for row in result["buckets"]:
        print(" ".join(f"{row[name]:12.3f}" for name in columns))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
