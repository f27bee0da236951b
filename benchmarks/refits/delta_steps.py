"""The cost of a delta of one bucket on a GPU, step by step, compared with the memory that each step must
read.

    python -m benchmarks.refits.delta_steps [--mib 128] [--fractions 0.001 0.01 0.05 0.2 1] [--rounds 7] [--json FILE]

A bucket of random words of which some have changed is compared with what was sent, encoded, and written to rows of
an engine's memory. First all of it must have the bits that `reshard.delta.encoding` makes of one chunk after the
other on the CPU, at odd sizes, in every form, three times over: a difference that comes and goes is a race; and what
is of another bucket, or has a position that cannot be, must be written nowhere. Then medians in ms, beside the floor,
which is both versions read once at the rate at which a copy reads, and beside the same steps by torch's operations, of
all chunks at once and chunk by chunk. "In a row" is what one bucket after another takes where nobody waits for each.
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
from reshard.delta.chunks import CHUNK, WORD, ChunkSizes, Comparison, decode_chunks, encode_chunks
from reshard.delta.encoding import encode
from reshard.delta.forms import Form
from reshard.refit.changes.buckets import (
    HostChanges,
    ServedBucket,
    header_bytes,
    read_changes,
    received_on_gpu,
)
from reshard.refit.codecs import codec_between
from reshard.refit.copying.tables import CODEC, COLUMNS, DST, DST_PITCH, PRELUDE, ROWS, SRC, STATUS, WIDTH

SIZES = [8, 4096 + 8, CHUNK - 8, CHUNK, CHUNK + 8, 5 * CHUNK + 24, 12 * CHUNK + 65536 + 8]  # words
FRACTIONS = [0.0, 1e-5, 0.001, 0.02, 0.2, 0.6, 0.99, 1.0]
ROW = 1000  # words of a row of the engine's memory
AS_WORD = torch.int16
IN_A_ROW = 20
SINCE, BUCKET = 7, 3  # which changes build on, and are of


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


def found(old: torch.Tensor, new: torch.Tensor, keep: bool = False):
    """Return what changed, as a refit finds it; with `keep` `old` becomes `new` on a GPU."""
    old, new = old.view(torch.uint8), new.view(torch.uint8)
    if device() == "cpu":
        return HostChanges(old, new)
    from reshard.refit.changes.kernels import DeviceChanges

    return DeviceChanges(old, new, keep)


def encoded(changes, size: int) -> torch.Tensor:
    """Return the changes in the `size` bytes that they take."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device())
    changes.encode(payload, SINCE, BUCKET)
    return payload


def write(served: ServedBucket, payload: torch.Tensor, words: int, status: torch.Tensor) -> None:
    """Write changes where they are served from; on a GPU, enqueue that."""
    if device() == "cuda":
        served.write(received_on_gpu(payload, WORD * words, SINCE, BUCKET, status))
        return
    for changes in read_changes(payload, WORD * words, SINCE, BUCKET, "this benchmark"):
        served.write(changes)


def new_status() -> torch.Tensor:
    return torch.zeros(STATUS, dtype=torch.int64, device=device())


def by_torch(compared: Comparison) -> tuple[ChunkSizes, torch.Tensor]:
    """Encode the changes of all chunks at once by torch's operations, without what travels ahead of them."""
    sizes = ChunkSizes.of(len(compared.words), compared.changed.cpu().numpy())
    payload = torch.zeros(sizes.total, dtype=torch.uint8, device=compared.words.device)
    encode_chunks(compared, sizes, payload)
    return sizes, payload


def expected(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return what travels, made of one chunk after the other on the CPU."""
    deltas = [encode(*pair) for pair in zip(old.cpu().split(CHUNK), new.cpu().split(CHUNK), strict=True)]
    numbers = [SINCE, BUCKET, len(deltas)]
    for delta in deltas:
        numbers += [int(delta.form), delta.changed]
    return torch.cat([torch.tensor(numbers).view(torch.uint8), *(delta.payload for delta in deltas)])


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


def filled(memory: torch.Tensor, contents: torch.Tensor, row: int) -> None:
    """Write bytes into the rows, as an engine has them that was refitted with all."""
    rows = len(contents) // row
    memory[:rows, :row] = contents[: rows * row].view(-1, row)
    memory[rows, : len(contents) - rows * row] = contents[rows * row :]


def in_rows(memory: torch.Tensor, size: int, row: int) -> torch.Tensor:
    """Return the bytes that lie in rows, and check that nothing lies between them."""
    assert not memory[:, row:].any(), "bytes between rows"
    return memory[:, :row].reshape(-1)[:size]


def served_bytes(words: torch.Tensor, codec: int) -> torch.Tensor:
    return (words.view(torch.bfloat16).float() if codec else words).view(torch.uint8)


def check() -> int:
    """Compare each step with the CPU's, chunk by chunk; return the number of cases."""
    cases = 0
    # Plain, cast, and byte by byte.
    kinds = ((0, 2 * ROW), (codec_between("bfloat16", "float32"), 2 * ROW), (0, 2 * ROW - 1))
    for words in SIZES:
        for fraction in FRACTIONS:
            old, new = versions(words, fraction, words)
            wanted = expected(old, new)
            for codec, row in kinds:
                width = row * (2 if codec else 1)
                before, after = served_bytes(old, codec), served_bytes(new, codec)
                memory, served = rows_for(words, codec, row)
                for _ in range(3):
                    where = f"{words} words, {fraction}, rows of {row} bytes, codec {codec}"
                    kept = old.clone()
                    changes = found(kept, new, keep=True)
                    assert torch.equal(kept, new if device() == "cuda" else old), f"{where}: kept"
                    payload = encoded(changes, int(changes.total))
                    assert torch.equal(payload.cpu(), wanted), f"{where}: encoded"
                    filled(memory, before, width)
                    if device() == "cuda":
                        refused(served, payload, words)
                        assert torch.equal(in_rows(memory, len(before), width), before), f"{where}: refused"
                    status = new_status()
                    write(served, payload, words, status)
                    assert not status[0], f"{where}: {status.tolist()}"
                    written = in_rows(memory, len(after), width)
                    assert torch.equal(written, after), f"{where}: written"
                    assert torch.equal(written, before) == torch.equal(old, new), "the control"
                cases += 1
    return cases


def refused(served: ServedBucket, payload: torch.Tensor, words: int) -> None:
    """What is of another bucket, or says another number of changes than there are, or another form, is refused."""
    form = Form(int(payload.view(torch.int64)[PRELUDE]))
    for place in (1, PRELUDE if form is Form.PLAIN else PRELUDE + 1):
        spoiled, status = payload.clone(), new_status()
        spoiled.view(torch.int64)[place] += 1
        write(served, spoiled, words, status)
        assert status[0], f"{words} words: number {place} is another, and was not refused"


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
    changes = found(old, new)
    payload, (_, served), status = encoded(changes, int(changes.total)), rows_for(words), new_status()
    compared = Comparison.of(old, new)
    sizes, listed = by_torch(compared)
    assert torch.equal(listed, payload[header_bytes(WORD * words) :])
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    copied = milliseconds(lambda: old.copy_(old.clone()), rounds) / 2  # reads and writes as much as two reads
    result = {
        "fraction": fraction,
        "payload_mb": len(payload) / 1e6,
        "floor_reads": copied,
        "compare": milliseconds(lambda: found(old, new).total.cpu(), rounds),
        "encode": milliseconds(lambda: encoded(changes, len(payload)), rounds),
        "write": milliseconds(lambda: write(served, payload, words, status), rounds),
    }
    for name, step in (
        ("compare_row", lambda: found(old, new)),
        ("encode_row", lambda: encoded(changes, len(payload))),
        ("write_row", lambda: write(served, payload, words, status)),
    ):
        result[name] = milliseconds(lambda step=step: [step() for _ in range(IN_A_ROW)], rounds) / IN_A_ROW
    if device() == "cuda":
        result["extra_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    result["torch_compare"] = milliseconds(lambda: Comparison.of(old, new).changed.cpu(), rounds)
    result["torch_encode"] = milliseconds(lambda: by_torch(compared), rounds)
    result["torch_decode"] = milliseconds(lambda: list(decode_chunks(listed, sizes)), rounds)
    result["chunk_by_chunk"] = milliseconds(lambda: chunk_by_chunk(old, new), 2)
    assert not status[0]
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
