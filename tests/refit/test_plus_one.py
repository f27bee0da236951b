"""Copies plus 1 of what a trainer holds less 1, as a refit reads them."""

import torch

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part
from reshard.device.stored import plus_one, write_plus_one
from reshard.refit.trainer import Trainer
from reshard.trainers.plus_one import PlusOne
from tests.tools.whole_model import region


class Norms(Trainer):
    """A norm of eight numbers, which is held less 1, and a matrix."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(8), torch.ones(4, 2)]

    @property
    def memory(self):
        return [region(tensor) for tensor in self.tensors]

    @property
    def device(self):
        return torch.device("cpu")

    def check_model(self, model):
        pass

    def name_of(self, index):
        return ["norm", "matrix"][index]

    def publish(self, model):
        shapes = {"norm": (8, 1), "matrix": (4, 2)}
        return [
            LocalTensor(index, shape, (Part(name, Box((0, 0), shape), (0, 0)),))
            for index, (name, shape) in enumerate(shapes.items())
        ]


def test_copies_are_of_what_the_trainer_has_when_it_is_asked_where_its_memory_is():
    trainer = Norms()
    published = PlusOne(trainer, None, {"norm"})
    assert not published.has_pending_sync, "no rank waits for another"

    def read() -> tuple[list[int], list[float]]:
        addresses = published.addresses()
        norm, matrix = published.memory
        assert matrix.tensor is trainer.tensors[1] and matrix.tensor.data_ptr() in addresses
        assert norm.tensor.data_ptr() in addresses
        return addresses, norm.tensor.view(-1).tolist()

    first, numbers = read()
    assert numbers == [1.0] * 8
    trainer.tensors[0][2] = 0.5  # a step
    assert read() == (first, [1.0, 1.0, 1.5, *[1.0] * 5])
    trainer.tensors[0].data = torch.full((8,), 2.0)  # moved
    moved, numbers = read()
    assert moved != first and numbers == [3.0] * 8
    kept, trainer.tensors[0] = trainer.tensors[0], torch.full((8,), 4.0)  # replaced
    kept.fill_(7.0)
    assert read()[1] == [5.0] * 8
    trainer.tensors[0].data = torch.empty(0)  # offloaded: whoever reads memory refuses it by name
    assert 0 in published.addresses()


def test_several_tensors_are_written_as_each_by_itself():
    """Bit for bit, in bf16, of a vector and of a view with gaps."""
    numbers = [torch.randn(5, 64).mul(0.01).bfloat16()[:, ::2], torch.randn(64).bfloat16()]
    copies = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in numbers]
    write_plus_one(numbers, copies, [torch.empty_like(each, dtype=torch.float32) for each in copies])
    assert all(map(torch.equal, copies, map(plus_one, numbers)))
