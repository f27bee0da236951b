"""The destination of a refit: what an inference rank says of itself, and is told."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from reshard.core.placement import Placement
from reshard.device.memory import Region


class Scales(NamedTuple):
    """Of a local tensor ``[rows, columns]`` whose region holds fp8: where the fp32 scales of its 128x128 blocks
    lie, ``[rows / 128, columns / 128]`` rounded up, and how they are rounded (`reshard.quantization.fp8_blocks.ROUNDINGS`)."""

    region: Region
    rounding: str


class Engine(ABC):
    """One rank of a running inference engine.

    `hf_config` is the published config of the model that it serves, `placement` what its local tensors hold
    of the canonical ones, and `regions` where each of these lies, by its id, in an order that stays. A refit
    writes into the regions, and into the `scales` of those that are quantized, and nowhere else. As long as it is
    not `ready`, from when it is made on, an engine refuses to serve.
    """

    hf_config: dict[str, Any]
    placement: Placement
    regions: Mapping[Any, Region]
    scales: Mapping[Any, Scales]  # by the ids of those that are quantized
    # By the ids of local tensors that only pass through their regions, the round in which they do: the regions of all
    # rounds may be the same memory. When those of a round have come, `process_round` is called, before the first of the next.
    staged_rounds: Mapping[Any, int]
    # Published names that a trainer may lack altogether; `offered` is told, before anything is planned, which of them it has.
    optional: frozenset[str] = frozenset()
    timeout: float = 60.0  # seconds that ranks wait for each other where they make something together
    tp: int  # its tensor parallel size, by which replicas among engines' ranks are told apart

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it holds whole weights."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version that the last whole refit brought; None before."""

    def offered(self, names: Set[str]) -> None:
        """The trainer has these of the `optional` names: what is made of the others is no longer part of the placement.

        Raises ReshardError where the engine cannot serve without it."""
        raise NotImplementedError(
            f"{type(self).__name__} has optional names, and does not say what it is without them"
        )

    @abstractmethod
    def follow(self) -> bool:
        """Find the local tensors again where the engine has moved them; whether there were any.

        Raises ReshardError where one has no memory, or is no longer what it was at connect.
        """

    @abstractmethod
    def begin(self) -> None:
        """Before the first byte: not ready, until `end`."""

    @abstractmethod
    def quantized(self) -> list[dict[str, Any]]:
        """What it does not serve from the trainer's dtype, for logs: ``how``, by which ``kernel``, and how many
        ``layers``."""

    @abstractmethod
    def process_round(self, number: int) -> None:
        """Make what is served of the local tensors of a round, which lie in their regions now. On a GPU they are there
        once the current stream is."""

    @abstractmethod
    def mismatches(self, number: int) -> list[Any]:
        """The ids of the local tensors of a round, which lie in their regions now, of which something else is served."""

    @abstractmethod
    def update_derived(self) -> None:
        """After the last byte: make again what is derived from the weights."""

    def stale_derived(self) -> list[str]:
        """For a check: the names of tensors that it derives from the weights, and that are not what those give."""
        return []

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """What a refit does to each of its tensors, for logs: ``what`` (brought, derived, left alone), ``how`` or why, how many
        ``tensors``, and the name of the ``first``."""
        return []

    @abstractmethod
    def end(self, version: int) -> None:
        """All members have what they need: ready, with weights of this version."""
