"""A verification of fp8 blocks that travel, by each way on which they do: as the engine has to have them it passes, and
one bit of a code or a scale fails it."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.quantization.fp8_blocks import BLOCK, encode
from reshard.refit import RefitGroup, connect
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.refit.served import Scales
from reshard.refit.trainer import Trainer
from tests.refit.test_blocks import rounded, weights
from tests.refit.test_transports import CONFIG
from tests.starting.ranks import caught, free_port

FP8 = torch.float8_e4m3fn


class Matrix(NamedTuple):
    """A matrix that is served in blocks: the trainer's dtype, the boxes that its ranks hold, and the rows and columns
    of zeros around it in the engine."""

    shape: tuple[int, int]
    rounding: str
    dtype: torch.dtype
    boxes: tuple[Box, Box]
    padding: tuple[int, int] = (0, 0)

    @property
    def served(self) -> tuple[int, int]:
        return self.shape[0] + self.padding[0], self.shape[1] + self.padding[1]


def halves(shape: tuple[int, int], axis: int, at: int) -> tuple[Box, Box]:
    """The boxes of a matrix before and behind a row (axis 0) or a column."""
    begin, first, rest = [0, 0], [*shape], [*shape]
    begin[axis], first[axis], rest[axis] = at, at, shape[axis] - at
    return Box((0, 0), tuple(first)), Box(tuple(begin), tuple(rest))


# Strips of eight blocks and one more, whose last rows are padding; strips of which each rank has some blocks; blocks of
# which each rank has some rows; and one narrow block of odd rows.
MATRICES = {
    "strips": Matrix((300, 1296), "fp32", torch.bfloat16, halves((300, 1296), 0, 256), (20, 0)),
    "gaps": Matrix((256, 1100), "ue8m0", torch.float32, halves((256, 1100), 1, 512)),
    "parts": Matrix((200, 333), "twice", torch.bfloat16, halves((200, 333), 0, 100)),
    "narrow": Matrix((130, 77), "stored", torch.float32, halves((130, 77), 0, 128), (0, 3)),
}


class Halves(Trainer):
    """A trainer's rank with its box of each matrix."""

    def __init__(self, rank: int) -> None:
        self.boxes = {name: matrix.boxes[rank] for name, matrix in MATRICES.items()}
        self.tensors: dict[str, torch.Tensor] = {}
        for seed, (name, matrix) in enumerate(MATRICES.items()):
            (top, left), (rows, columns) = self.boxes[name].offsets, self.boxes[name].lengths
            values = weights(*matrix.shape, seed)[top : top + rows, left : left + columns]
            self.tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(matrix.dtype)

    @property
    def memory(self):
        return [Region(tensor, 0, tensor.shape[1]) for tensor in self.tensors.values()]

    def publish(self, model):
        return [
            LocalTensor(index, box.lengths, (Part(name, box, (0, 0)),))
            for index, (name, box) in enumerate(self.boxes.items())
        ]

    def check_model(self, model):
        pass

    def name_of(self, index):
        return [*self.boxes][index]


class InBlocks(Engine):
    """An engine's rank that serves all of each matrix in blocks; `spoil` changes what it serves once it has come."""

    hf_config, tp = CONFIG, 1

    def __init__(self) -> None:
        self.guard, self.spoil = Guard("test", False, "nothing"), lambda: None
        self.codes, self.factors, self.regions, self.scales, tensors = {}, {}, {}, {}, {}
        for name, matrix in MATRICES.items():
            rows, columns = matrix.served
            self.codes[name] = torch.full((rows, columns + 16), 7, dtype=torch.uint8)
            self.factors[name] = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
            self.regions[name] = Region(self.codes[name].view(FP8), 0, columns + 16)
            self.scales[name] = Scales(
                Region(self.factors[name], 0, self.factors[name].shape[1]), matrix.rounding
            )
            (height, width), (below, beside) = matrix.shape, matrix.padding
            padding = Box((height, 0), (below, columns)), Box((0, width), (height, beside))
            part = Part(name, Box((0, 0), matrix.shape), (0, 0))
            fills = tuple(box for box in padding if all(box.lengths))
            tensors[name] = LocalTensor(name, matrix.served, (part,), fills)
        self.placement = Placement({name: matrix.shape for name, matrix in MATRICES.items()}, tensors)

    def update_derived(self):
        self.spoil()

    def flip(self, kept: dict[str, torch.Tensor], name: str) -> None:
        """Change the last bit of a matrix's last code, or scale."""
        rows, columns = MATRICES[name].served
        bits = (
            self.codes[name][:rows, :columns] if kept is self.codes else self.factors[name].view(torch.int32)
        )
        bits[-1, -1] ^= 1

    def expected(self, name: str) -> bool:
        """Return whether a matrix is served as its blocks are encoded by themselves."""
        matrix, (_, columns) = MATRICES[name], MATRICES[name].served
        values = np.zeros(matrix.served, rounded(np.zeros((1, 1), np.float32)).dtype)
        values[: matrix.shape[0], : matrix.shape[1]] = rounded(
            weights(*matrix.shape, [*MATRICES].index(name))
        )
        codes, scales = encode(values, matrix.rounding)
        same = np.array_equal(self.codes[name][:, :columns].numpy(), codes.view(np.uint8))
        return (
            same
            and np.array_equal(self.factors[name].numpy(), scales)
            and bool(self.codes[name][:, columns:].eq(7).all())
        )


@pytest.mark.parametrize("backend", ["nccl", "staged", "nixl"])
def test_a_verification_names_the_matrix_of_a_bit_that_is_another_by_whatever_way_its_blocks_have_come(
    backend,
):
    address = f"127.0.0.1:{free_port()}"
    faults = [
        [(kind, name) for kind, name in zip(kinds, pair, strict=True)]
        for pair in (("strips", "gaps"), ("parts", "narrow"))
        for kinds in (("codes", "factors"), ("factors", "codes"))
    ]

    def member(rank: int):
        group = RefitGroup.join(address, rank, 3, timeout=60)
        engine = InBlocks() if rank == 2 else None
        source = Halves(rank) if engine is None else None
        link = connect(group, source, engine, backend=backend, bucket_bytes=1 << 20)
        report, said = link.refit(verify=True), []
        for fault in faults:
            if engine is not None:
                engine.spoil = lambda fault=fault: [
                    engine.flip(getattr(engine, kind), name) for kind, name in fault
                ]
            said.append(caught(lambda: link.refit(verify=True)))
        if engine is not None:
            engine.spoil = lambda: None
        link.refit(verify=True)
        link.close()
        return (
            report.received_bytes,
            said,
            engine and [name for name in MATRICES if not engine.expected(name)],
        )

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(member, range(3)))
    received, _, wrong = results[-1]
    assert received[backend] > 0 and sum(received.values()) == received[backend] and wrong == []
    for _, said, _ in results:
        for fault, sentence in zip(faults, said, strict=True):
            names = ", ".join(sorted(name for _, name in fault))
            assert f"2 tensors did not arrive as they are in the trainer: {names}" in sentence, sentence


class Codes(Halves):
    """A trainer's rank that holds codes of fp8, as one with quantized parameters would."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.tensors = {name: tensor.to(FP8) for name, tensor in self.tensors.items()}


def test_codes_without_their_scales_are_refused_by_an_engine_that_serves_blocks():
    """Copied, they would be served with the scales of other codes, and a verification would find them equal."""
    address = f"127.0.0.1:{free_port()}"

    def member(rank: int):
        group = RefitGroup.join(address, rank, 3, timeout=60)
        engine, source = (InBlocks(), None) if rank == 2 else (None, Codes(rank))
        return caught(lambda: connect(group, source, engine, backend="staged", bucket_bytes=1 << 20))

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(member, range(3)))
    sentence = "is float8_e4m3fn in the trainer, but float8_e4m3fn in the engine: use a trainer with parameters in bf16"
    assert all(sentence in one for one in said), said
