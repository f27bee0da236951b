"""A transformers model whose parameters one process trains, and one that another serves: the two sides of a
refit with nothing else in them."""

import torch

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.refit.trainer import Trainer


def whole(index, name: str, tensor: torch.Tensor) -> LocalTensor:
    """A local tensor that is all of a published one."""
    shape, start = tuple(tensor.shape), (0,) * tensor.ndim
    return LocalTensor(index, shape, (Part(name, Box(start, shape), start),))


def region(tensor: torch.Tensor) -> Region:
    return Region(tensor, 0, tensor.shape[1] if tensor.ndim > 1 else 1)


class TrainedModel(Trainer):
    """The parameters of a model, by their own names, which are the published ones."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self._regions = [region(parameter.data) for parameter in self.parameters.values()]

    @property
    def memory(self):
        return self._regions

    def publish(self, model):
        return [whole(index, *named) for index, named in enumerate(self.parameters.items())]

    def check_model(self, model):
        pass

    def name_of(self, index):
        return [*self.parameters][index]


class ServedModel(Engine):
    """Tensors of the same names and shapes in bf16."""

    tp = 1

    def __init__(self, model: torch.nn.Module) -> None:
        self.hf_config, self.guard = model.config.to_dict(), Guard("test", False, "nothing")
        parameters = model.named_parameters()
        self.tensors = {
            name: torch.zeros(p.shape, dtype=torch.bfloat16, device=p.device) for name, p in parameters
        }
        self.regions = {name: region(tensor) for name, tensor in self.tensors.items()}
        self.placement = Placement(
            {name: tuple(tensor.shape) for name, tensor in self.tensors.items()},
            {name: whole(name, name, tensor) for name, tensor in self.tensors.items()},
        )


class Training:
    """Steps of Adam in fp32 on the tokens of a text, as after a pretraining."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, rate: float, length: int) -> None:
        self.model, self.length = model, length
        self.batches = tokens[: len(tokens) // length * length].view(-1, length)
        self.optimizer, self.steps = torch.optim.Adam(model.parameters(), lr=rate), 0

    def step(self) -> None:
        batch = self.batches[self.steps % len(self.batches)][None]
        self.model(batch, labels=batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
