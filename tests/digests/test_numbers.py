"""The digest of weights: against whole numbers of Python, however weights are cut, and what it sees."""

import random

import numpy as np
import pytest

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.digests import numbers
from reshard.digests.parts import numbers_of
from reshard.storage.io.streams import TensorInfo
from tests.digests import oracle

CASES = [
    ((7, 5), "bfloat16"), ((33,), "float32"), ((3, 4, 5), "float8_e4m3fn"), ((), "float64"), ((0, 4), "bfloat16"),
    ((9, 70_000), "int16"),
]  # fmt: skip


def drawn(info: TensorInfo, seed: int = 0) -> np.ndarray:
    """Random bits as the numbers of a tensor ``[rows, columns]``."""
    data = random.Random(seed).randbytes(info.size_bytes)
    return np.frombuffer(data, info.dtype.numpy()).reshape(info.rows, info.columns)


def number(name: str, info: TensorInfo, rows: np.ndarray) -> int:
    """The number of a tensor."""
    seed = numbers.seed_of(name, info)
    return numbers.number_of(seed, [numbers.sum_rows(seed, rows)])


@pytest.mark.parametrize("shape, dtype", CASES[:5])
def test_a_number_is_what_whole_numbers_give(shape, dtype):
    info = TensorInfo(shape, DTYPES[dtype])
    rows = drawn(info)
    assert number("a", info, rows) == oracle.number("a", dtype, list(shape), rows.tobytes())
    others = [number("b", info, rows), oracle.number("a", "int8", list(shape), rows.tobytes())]
    assert number("a", info, rows) not in others, "the control: another name, another dtype"


@pytest.mark.parametrize("shape, dtype", CASES)
def test_a_number_is_a_sum_however_the_tensor_is_cut(shape, dtype):
    info = TensorInfo(shape, DTYPES[dtype])
    rows, seed = drawn(info), numbers.seed_of("a", info)
    middle, split = info.rows // 2, info.columns // 3
    boxes = [
        (a, b, c, d)
        for a, b in ((0, middle), (middle, info.rows))
        for c, d in ((0, split), (split, info.columns))
    ]
    sums = [numbers.sum_rows(seed, np.ascontiguousarray(rows[a:b, c:d]), a, c) for a, b, c, d in boxes]
    assert numbers.number_of(seed, sums) == number("a", info, rows)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "float64"])
def test_one_flipped_bit_shows_at_each_position_and_a_change_says_by_how_much(dtype):
    info = TensorInfo((5, 3), DTYPES[dtype])
    rows, seed = numbers.bits_of(drawn(info)), numbers.seed_of("a", info)
    whole, seen = numbers.sum_rows(seed, rows), set()
    for row, column in np.ndindex(5, 3):
        for bit in range(8 * info.dtype.size):
            other = rows.copy()
            other.view(f"u{info.dtype.size}")[row, column] ^= other.view(f"u{info.dtype.size}").dtype.type(
                1 << bit
            )
            at = np.array([row]), np.array([column])
            change = numbers.sum_change(seed, rows[at], other[at], *at)
            assert numbers.total_of([whole, change]) == numbers.sum_rows(seed, other) != whole
            seen.add(numbers.sum_rows(seed, other))
    assert len(seen) == 15 * 8 * info.dtype.size, "each flip gives another number"


def test_a_tensor_of_zeros_counts():
    info = TensorInfo((4, 4), DTYPES["bfloat16"])
    zeros = np.zeros((4, 4), DTYPES["bfloat16"].numpy())
    given = {number(name, info, zeros) for name in ("a.bias", "b.bias")}
    assert len(given) == 2 and 0 not in given
    assert numbers.start_total({"a.bias": info, "b.bias": info}) == numbers.total_of(given)


def test_rounded_numbers_are_those_of_the_dtype_and_every_nan_is_one():
    bf16 = DTYPES["bfloat16"]
    held = np.array([[1.00390625, -0.0, 3.4e38, np.inf]], np.float32)
    nans = np.array([[0x7FC00001, 0xFFC00000, 0x7F800001]], np.uint32).view(np.float32)
    assert numbers.rounded(held, bf16).view(np.uint16).tolist() == [[0x3F80, 0x8000, 0x7F80, 0x7F80]]
    assert numbers.rounded(nans, bf16).view(np.uint16).tolist() == [[0x7FC0] * 3]
    assert numbers.rounded(nans, DTYPES["float32"]) is nans, "the control: as held, bits are kept"


# Mistakes of a kind, each with random weights; `a` and `b` are two tensors of one shape.
ROWS = COLUMNS = 8


def swapped(i, j, a, b):
    a[[i, j]] = a[[j, i]]


MISTAKES = {
    "swapped rows": lambda r, a, b: swapped(*r.choice(ROWS, 2, replace=False), a, b),
    "swapped rows and columns": lambda r, a, b: (
        swapped(*r.choice(ROWS, 2, replace=False), a, b), swapped(*r.choice(COLUMNS, 2, replace=False), a.T, b)
    ),
    "two elements exchanged": lambda r, a, b: a.reshape(-1).__setitem__([0, 9], a.reshape(-1)[[9, 0]]),
    "permuted rows": lambda r, a, b: a.__setitem__(slice(None), a[r.permutation(ROWS)]),
    "swapped experts": lambda r, a, b: (lambda c: (a.__setitem__(..., b), b.__setitem__(..., c)))(a.copy()),
    "swapped halves": lambda r, a, b: a.__setitem__(slice(None), np.roll(a, ROWS // 2, 0)),
    "interleaved halves": lambda r, a, b: a.__setitem__(
        slice(None), a.reshape(2, ROWS // 2, COLUMNS).swapaxes(0, 1).reshape(ROWS, COLUMNS)
    ),
    "transposed": lambda r, a, b: a.__setitem__(slice(None), a.T.copy()),
    "a shard off by one row": lambda r, a, b: a.__setitem__(slice(0, 4), a[1:5].copy()),
    "a shard off by one column": lambda r, a, b: a.__setitem__((slice(None), slice(0, 4)), a[:, 1:5].copy()),
    "zeroed rows": lambda r, a, b: a.__setitem__(slice(6, None), 0),
    "negated": lambda r, a, b: a.__setitem__(slice(None), a ^ a.dtype.type(1 << 8 * a.itemsize - 1)),
    "two signs": lambda r, a, b: a.__setitem__((0, slice(0, 2)), a[0, :2] ^ a.dtype.type(1 << 8 * a.itemsize - 1)),
    "lowest bits": lambda r, a, b: a.__setitem__(slice(None), a ^ a.dtype.type(1)),
    "doubled": lambda r, a, b: a.__setitem__(slice(None), a + a.dtype.type(1 << (7 if a.itemsize == 2 else 23))),
}  # fmt: skip
LOW = 0xFFFFF  # the low bits of a sum depend on low bits only: they are the first that coincide
TRIES = 1000


def coincidences(mistake: str, dtype: type, widened: bool, digest, low: int = LOW) -> int:
    """How many of the mistakes leave the lowest bits of two tensors' digest as they were."""
    rng, same, info = np.random.default_rng(0), 0, TensorInfo((ROWS, COLUMNS), DTYPES["int32"])
    for trial in range(TRIES):
        seeds = [numbers.seed_of(f"layers.{trial}.experts.{i}", info) for i in (0, 1)]
        pair = [rng.integers(0, np.iinfo(dtype).max, (ROWS, COLUMNS), dtype) for _ in seeds]
        if widened:
            pair = [tensor & dtype(0xFFFF0000) for tensor in pair]
        before = sum(map(digest, seeds, pair))
        MISTAKES[mistake](rng, *pair)
        same += (sum(map(digest, seeds, pair)) - before) & low == 0
    return same


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype, widened", [(np.uint16, False), (np.uint32, False), (np.uint32, True)])
def test_mistakes_are_missed_as_seldom_as_chance_has_it(mistake, dtype, widened):
    """Of 20 bits, products of two keys miss 40 of 2**20, and 800 where both rows and columns change places."""
    assert coincidences(mistake, dtype, widened, numbers.sum_rows) <= 5


def plain_sum(seed: int, rows: np.ndarray) -> int:
    """The sum of the same products without mixing."""
    keys = numbers.row_keys(seed, 0, len(rows))[:, None] * numbers.column_keys(rows.shape[1])
    return int((rows.astype(np.uint64) * keys).sum(dtype=np.uint64))


@pytest.mark.parametrize(
    "mistake, widened", [("negated", False), ("two signs", False), ("swapped rows", True)]
)
def test_without_mixing_such_mistakes_would_be_missed(mistake, widened):
    """The control."""
    assert coincidences(mistake, np.uint32, widened, plain_sum, 0xFFFF) == TRIES


def test_what_ranks_say_is_put_together_and_each_element_counts_once():
    info = {"a": TensorInfo((4, 6), DTYPES["bfloat16"])}
    rows, seed = drawn(info["a"]), numbers.seed_of("a", info["a"])

    def said(*boxes):
        return [["a", list(box), numbers.sum_rows(seed, np.ascontiguousarray(rows[box[0]:box[1], box[2]:box[2]+box[3]]),
                                                  box[0], box[2])] for box in boxes]  # fmt: skip

    left, right, top, below = (0, 4, 0, 3), (0, 4, 3, 3), (0, 3, 0, 6), (1, 4, 0, 6)
    assert numbers_of(info, [said(left), said(right, left)], "it", "go") == {
        "a": number("a", info["a"], rows)
    }
    for answers, sentence in (
        ([said(left)], "it holds 12 of the 24 elements of a, or parts of it that overlap: go"),
        ([said(top, (2, 4, 0, 3))], "parts of it that overlap: go"),
        ([said(left, right), [["a", [0, 4, 0, 3], 5]]], "ranks of it hold different numbers of a: go"),
        ([said(left, right), [["b", [0, 4, 0, 3], 5]]], "it holds b, which the model does not have: go"),
    ):
        with pytest.raises(ReshardError, match=sentence):
            numbers_of(info, answers, "it", "go")
    with pytest.raises(ReshardError, match="holds 36 of the 24"):
        numbers_of(info, [said(top, below)], "it", "go")
