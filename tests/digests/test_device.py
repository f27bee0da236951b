"""Digests of boxes in memory, by the host and by the kernel under Triton's interpreter, against whole numbers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from reshard.core.boxes import Box
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.device.digest_tiles import block_columns, tiles_of
from reshard.device.digests import Sums, published, sums_of
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.digests.numbers import number_of, seed_of
from reshard.storage.io.boxes import Rows
from reshard.storage.io.streams import TensorInfo
from tests.digests import oracle

# Shape, where rows and columns are cut in two, elements between the rows in memory, held dtype, dtype that counts.
CASES = [
    ((7, 12), 3, 5, 4, "bfloat16", "bfloat16"),
    ((130, 3), 70, 1, 0, "float32", "float32"),
    ((9, 1100), 4, 300, 60, "float32", "bfloat16"),
    ((5, 200), 2, 128, 8, "bfloat16", "float32"),
    ((11, 6), 5, 2, 0, "float16", "float32"),
    ((6, 40), 3, 8, 24, "float8_e4m3fn", "float8_e4m3fn"),
    ((6, 4), 3, 1, 0, "int64", "int64"),
]


def boxes_of(case, less_1: bool = False) -> tuple[list[LiveBox], list[int], int]:
    """A tensor's four boxes in memory, their seeds, and the tensor's number in whole numbers."""
    (rows, columns), row, column, between, held, counted = case
    rng = np.random.default_rng(rows)
    size, pitch = DTYPES[held].size, columns + between
    if DTYPES[held].floating and size > 1:
        memory = torch.from_numpy(rng.standard_normal((rows, pitch), np.float32)).to(getattr(torch, held))
        if not less_1:
            memory[0, :2] = torch.tensor([float("nan"), -0.0])
    else:
        memory = torch.from_numpy(rng.integers(0, 200, (rows, pitch * size), np.uint8)).view(
            getattr(torch, held)
        )
    numbers = memory[:, :columns]
    if less_1:
        numbers = (numbers.float() + 1).to(memory.dtype)
    numbers = numbers.to(getattr(torch, counted)).contiguous()
    if held != counted and not less_1:
        bits = {"bfloat16": (torch.int16, 0x7FC0), "float32": (torch.int32, 0x7FC00000)}[counted]
        numbers.view(bits[0])[0, 0] = bits[1]
    info, data = TensorInfo((rows, columns), DTYPES[counted]), numbers.view(torch.uint8).numpy().tobytes()
    boxes = []
    for start, stop in ((0, row), (row, rows)):
        for first, end in ((0, column), (column, columns)):
            box = Box((start, first), (stop - start, end - first))
            region = Region(memory, first, pitch)
            local = Rows(start, stop, 0, end - first)
            boxes.append(LiveBox("a", box, region, local, info.dtype.held(less_1)))
    return boxes, [seed_of("a", info)] * 4, oracle.number("a", counted, [rows, columns], data)


@pytest.mark.parametrize("case", CASES)
def test_boxes_in_memory_give_the_number_of_their_tensor(case):
    boxes, seeds, wanted = boxes_of(case)
    assert number_of(seeds[0], sums_of(boxes, seeds)) == wanted
    held = boxes[3].region.tensor.view(torch.uint8)
    held[-1, -1 - case[3] * held.shape[1] // (case[0][1] + case[3])] ^= 0x40
    assert number_of(seeds[0], sums_of(boxes, seeds)) != wanted, "the control"


@pytest.mark.parametrize("case", [CASES[2], CASES[0]])
def test_numbers_that_are_held_less_one_count_as_published(case):
    boxes, seeds, wanted = boxes_of(case, less_1=True)
    assert number_of(seeds[0], sums_of(boxes, seeds)) == wanted
    assert number_of(seeds[0], sums_of([published(box) for box in boxes], seeds)) == wanted
    as_held = [box._replace(dtype=box.dtype.published) for box in boxes]
    assert number_of(seeds[0], sums_of(as_held, seeds)) != wanted, "the control"


@pytest.mark.parametrize("case", CASES)
def test_a_box_that_is_held_transposed_gives_the_number_of_its_tensor(case):
    boxes, seeds, wanted = boxes_of(case)
    apart = []
    for box in boxes:
        rows, columns = box.box.lengths
        memory = torch.zeros((columns, 2 * rows + 3), dtype=box.region.tensor.dtype)
        memory[:, 1 : 2 * rows + 1 : 2] = box.matrix().t()
        local = Rows(0, rows, 0, columns)
        apart.append(box._replace(region=Region(memory, 1, 2), local=local, step=2 * rows + 3))
    assert number_of(seeds[0], sums_of(apart, seeds)) == wanted
    assert number_of(seeds[0], sums_of([published(box) for box in apart], seeds)) == wanted, (
        "as a GPU has them"
    )
    groups = [*Sums([*boxes, *apart], seeds * 2)._groups([*range(8)])]
    assert [sorted(group) for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    apart[3].region.tensor.view(torch.uint8)[-1, -3 * DTYPES[case[4]].size - 1] ^= 0x40  # of the last element
    assert number_of(seeds[0], sums_of(apart, seeds)) != wanted, "the control"


def test_tiles_cover_each_element_once():
    for columns in (1, 3, 100, 1024, 1536, 5000):
        memory = torch.zeros(1 << 20, dtype=torch.bfloat16)
        rows = len(memory) // columns
        box = LiveBox("a", Box((5, 7), (rows, columns)), Region(memory, 0, columns), Rows(0, rows, 0, columns),
                      DTYPES["bfloat16"])  # fmt: skip
        [(kind, tiles)] = tiles_of([box], [2**64 - 3]).items()
        assert kind == ("bfloat16", "bfloat16", block_columns(columns))
        seen = set()
        for address, _, n_rows, n_columns, pitch, counter, column in tiles.tolist():
            assert pitch == columns
            first, left = divmod((address - memory.data_ptr()) // 2, columns)
            assert (counter % 2**64, column) == ((first + 2) % 2**64, left + 7)
            seen |= {(first + r, left) for r in range(n_rows)}
            assert left + n_columns <= columns
        assert len(seen) == rows * -(-columns // block_columns(columns))


def test_the_kernel_gives_what_whole_numbers_give():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.digests.test_device"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def interpret() -> None:
    from reshard.device.digest_kernels import sums_of_tiles, tiles_on_gpu

    def sums_on_gpu(boxes, seeds, device):
        return sums_of_tiles(tiles_on_gpu(boxes, seeds, device), len(boxes), device)

    for case in CASES:
        boxes, seeds, wanted = boxes_of(case)
        if (case[4], case[5]) == ("float32", "bfloat16"):  # the interpreter truncates, where GPUs round
            for box in boxes:
                box.region.tensor.view(torch.int32).bitwise_and_(-0x10000)
            wanted = number_of(seeds[0], sums_of(boxes, seeds))
        sums = sums_on_gpu(boxes, seeds, torch.device("cpu"))
        assert number_of(seeds[0], sums) == wanted, case
        assert sums != sums_on_gpu(boxes, [seed + 1 for seed in seeds], torch.device("cpu")), "the control"
    boxes, seeds, _ = boxes_of(CASES[0])
    with pytest.raises(
        ReshardError, match="a GPU takes no digest of bfloat16 as float64: leave out the dtype"
    ):
        sums_on_gpu([box._replace(dtype=DTYPES["float64"]) for box in boxes], seeds, torch.device("cpu"))


if __name__ == "__main__":
    interpret()
