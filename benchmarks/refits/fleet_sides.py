"""A trainer and engines of published shapes without their weights, on simulated GPUs: what members say of them is real,
and so is what engines' ranks plan; nothing has memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.models import MODELS
from reshard.core.placement import LocalTensor, local_matrix
from reshard.device.memory import Region
from reshard.engines.vllm.layout import VllmLayout
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import expand, padded_vocab_size
from reshard.megatron.ranks import Ranks, live_shards
from reshard.models.model import Model
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.refit.options import ConnectOptions
from reshard.refit.protocol.greeting import DeviceInfo, Greeting
from reshard.refit.trainer import Trainer

GPUS_OF_A_HOST = 8
VOCAB_MULTIPLE = 128
# All tensors: a refit looks at addresses and dtypes, and here nothing is copied.
TENSORS = {"bfloat16": torch.zeros(1, dtype=torch.bfloat16), "float32": torch.zeros(1)}


@dataclass(frozen=True)
class Fleet:
    """A trainer's ranks, half of the members, in so many pipeline stages, and engines of so many ranks each."""

    name: str
    members: int
    engine_ranks: int
    stages: int
    layers: int | None = None  # of the model, if not all

    @property
    def trainers(self) -> int:
        """The number of the trainer's ranks, which are the first members."""
        return self.members // 2

    @property
    def engines(self) -> int:
        """The number of engines."""
        return (self.members - self.trainers) // self.engine_ranks

    @cached_property
    def config(self) -> dict[str, Any]:
        """The published config."""
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return MODELS[self.name] | layers

    @cached_property
    def model(self) -> Model:
        """The model."""
        return Model.from_hf(self.config, self.name)

    @property
    def layout(self) -> MegatronLayout:
        """The trainer's parallel sizes: within a stage all ranks share the experts out."""
        base, more = divmod(self.model.num_layers, self.stages)
        counts = [f"t*{base + (stage < more)}" for stage in range(self.stages)]
        return MegatronLayout(
            pp=self.stages,
            ep=self.trainers // self.stages,
            etp=1,
            pipeline_model_parallel_layout=f"E{'|'.join(counts)}L" if self.stages > 1 else None,
        )

    @property
    def engine_layout(self) -> VllmLayout:
        """The parallel sizes of each engine."""
        return VllmLayout(tp=self.engine_ranks, expert_parallel=True)

    def is_trainer(self, rank: int) -> bool:
        """Return whether a member is a rank of the trainer."""
        return rank < self.trainers

    def place(self, rank: int) -> int:
        """Return which rank of its engine a member is."""
        return (rank - self.trainers) % self.engine_ranks

    def greeting(self, rank: int) -> Greeting:
        """Return what a member says of itself first, as if each eight of a side were on a host of their own."""
        role = "trainer" if self.is_trainer(rank) else "inference"
        number = rank if self.is_trainer(rank) else rank - self.trainers
        host = f"{role}-host-{number // GPUS_OF_A_HOST}.cluster.example"
        options = ConnectOptions().told()
        return Greeting(f"{role} rank {rank}", [role], ignored=[], host=host, pid=1000 + rank, **options)

    def device(self, rank: int) -> DeviceInfo:
        """Return what a member says of its GPU."""
        gpu = f"{rank:08x}-0000-0000-0000-000000000000"
        return DeviceInfo("cuda", gpu, "", False, 0 if self.is_trainer(rank) else self.engine_ranks)


class SimulatedTrainer(Trainer):
    """A trainer's rank."""

    def __init__(self, tensors: list[LocalTensor], dtypes: list[str]) -> None:
        self.tensors = tensors
        self.regions = [_region(tensor.shape, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]

    @property
    def memory(self) -> list[Region]:
        return self.regions

    def publish(self, model: Model) -> list[LocalTensor]:
        return self.tensors

    def check_model(self, model: Model) -> None:
        return

    def name_of(self, index: int) -> str:
        return str(self.tensors[index].parts[0].name)


class SimulatedEngine(Engine):
    """An engine's rank."""

    def __init__(self, fleet: Fleet, place: int, dtype_of: Callable[[str], str]) -> None:
        self.hf_config, self.guard, self.tp = (
            fleet.config,
            Guard("simulation", False, "nothing"),
            fleet.engine_ranks,
        )
        self.placement = fleet.engine_layout.placement(fleet.model, place)
        self.regions = {
            identity: _region(tensor.shape, dtype_of(tensor.parts[0].name))
            for identity, tensor in self.placement.tensors.items()
        }


def _region(shape: tuple[int, ...], dtype: str) -> Region:
    return Region(TENSORS[dtype], 0, shape[1] if len(shape) > 1 else 1)


class Sides:
    """The trainer's ranks, and those of one engine: the others are its replicas."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        vocab = padded_vocab_size(fleet.model.symbols["V"], VOCAB_MULTIPLE, fleet.layout.tp)
        self.parameters = expand(fleet.model, "transformer_engine", vocab)
        self.trainers = self._trainers()
        self.engines = [SimulatedEngine(fleet, place, self._dtype_of) for place in range(fleet.engine_ranks)]

    def _dtype_of(self, name: str) -> str:
        return "float32" if name in self.parameters.fp32 else "bfloat16"

    def _trainers(self) -> list[SimulatedTrainer]:
        ranks = Ranks(self.fleet.model, self.fleet.layout, self.fleet.trainers // self.fleet.stages)
        held: list[list[LocalTensor]] = [[] for _ in range(self.fleet.trainers)]
        for parameter in self.parameters.parameters:
            for shard in live_shards(ranks, parameter):
                tensor = local_matrix(shard.tensor)
                for rank in shard.ranks if tensor.parts else ():
                    held[rank].append(tensor._replace(id=len(held[rank])))
        return [
            SimulatedTrainer(tensors, [self._dtype_of(tensor.parts[0].name) for tensor in tensors])
            for tensors in held
        ]
