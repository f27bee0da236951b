"""How the parameters of a layer that vLLM loads from a quantized checkpoint are made of plain weights: what all formats share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import tensor_parallel
from reshard.engines.vllm.layers import NVFP4, Compressed, experts_of
from reshard.quantization.channels import Channels
from reshard.quantization.int_groups import IntGroups
from reshard.quantization.nvfp4 import Nvfp4


def scheme_of(how: Compressed) -> Channels | IntGroups | Nvfp4:
    """Return the scheme of what a layer is loaded from."""
    if how.packed is None:
        return Channels(how.codes, how.strategy, how.block)
    if how.codes == NVFP4:
        return Nvfp4(divides=bool(how.packed.end))
    return IntGroups(how.packed.bits, None if how.block is None else how.block[1])


class Held(NamedTuple):
    """A part of a parameter: the published tensor's name and shape, the box of it, and the part's first row, experts below
    each other."""

    parameter: str
    name: str
    shape: tuple[int, ...]
    box: Box
    row: int


class Recipe(ABC):
    """How a layer's parameters, as vLLM would load them, are made of plain weights.

    `templates` are all its parameters as vLLM made them, `kept` the scales of its input, which come with a checkpoint and
    stay.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        how: Compressed,
        templates: Mapping[str, torch.Tensor],
        kept: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.module, self.how, self.templates, self.kept = name, module, how, templates, kept
        self.scheme = scheme_of(how)
        # The matrices of which other tensor parallel ranks hold parts with the same scales.
        self.split: set[str] = set()
        self.find_matrices()

    @abstractmethod
    def find_matrices(self) -> None:
        """Find out which parameters belong to which matrix. Raises ReshardError where vLLM keeps them in a way that is not
        known."""

    @property
    @abstractmethod
    def coded(self) -> set[str]:
        """The names of the parameters that are made of plain weights."""

    @abstractmethod
    def share_matrices(self, held: Sequence[Held]) -> None:
        """Add to `split` the matrices of which other ranks hold parts. Raises ReshardError where what has one scale cannot
        be quantized."""

    @abstractmethod
    def largest(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The largest magnitude of all that has one scale, among the plain `values`, in fp32, by matrix."""

    @abstractmethod
    def coded_of(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The parameters `coded`, and what else belongs to them, of plain `values` and the largest magnitudes of all
        ranks."""

    @property
    def plain(self) -> list[str]:
        """The names of the parameters that a refit fills and that vLLM would load as they are, such as biases."""
        others = () if self.how.packed is None else self.how.packed.others
        made = {*self.kept, *self.coded, *others}
        return [key for key in self.templates if key not in made]

    def share(self, held: Sequence[Held]) -> None:
        """Find out of the layer's parts of which matrices other ranks hold the rest. Raises ReshardError where parts of
        two published tensors would have one scale, and where ranks cannot find scales together."""
        self.share_matrices(held)
        experts, (ranks, _) = experts_of(self.module), tensor_parallel()
        if self.split and experts is not None and experts.tp != ranks:
            raise ReshardError(
                f"{self.name} splits its experts over {experts.tp} ranks, not over the {ranks} of tensor parallelism, and those "
                f"cannot find scales together: pass enable_expert_parallel=True, or serve in bf16"
            )

    def made(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The layer's parameters as vLLM would have loaded them, of plain `values` and the largest magnitudes of all
        ranks."""
        device = next(iter(values.values())).device
        found = {key: values[key] for key in self.plain}
        for key in () if self.how.packed is None else self.how.packed.others:
            if key in self.templates:  # what no kernel reads
                template = self.templates[key]
                found[key] = alike(torch.zeros(template.shape, dtype=template.dtype, device=device), template)
        for key, value in self.kept.items():
            template = self.templates[key]
            found[key] = alike(value.expand(template.shape).clone(), template)
        return found | self.coded_of(values, largest)


def alike(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """The tensor, as a parameter of the template's kind."""
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    return tensor


def find_together(vectors: Sequence[torch.Tensor], group: Any, timeout: float) -> None:
    """Let each element of these become the largest of all ranks in the group, which have as many in the same order. Waits
    for no longer than `timeout` seconds; on a GPU, enqueues it on the current stream."""
    if not vectors:
        return
    both = torch.cat(list(vectors))
    work = dist.all_reduce(both, dist.ReduceOp.MAX, group, async_op=True)
    if both.device.type == "cpu":
        work.wait(timedelta(seconds=timeout))
    else:
        work.wait()
    for vector, largest in zip(vectors, both.split([len(one) for one in vectors]), strict=True):
        vector.copy_(largest)


def refuse_parts_of_blocks(what: str, block: tuple[int, int], rows: int, parts: Sequence[Held]) -> None:
    """Raise ReshardError where a rank holds a part of what has one scale, or the blocks of a published tensor, in a matrix of
    so many `rows`, are not those of the matrix."""
    for part in parts:
        starts, lengths = part.box.offsets, part.box.lengths
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        within = any(
            start % size for start, size in zip((*starts, part.row % rows), (*block, block[0]), strict=True)
        )
        within |= any(
            end % size and end != length for end, size, length in zip(ends, block, part.shape, strict=True)
        )
        if within:
            raise ReshardError(
                f"{what} has a part of {part.name} that begins or ends within what has one scale, {block[0]} rows and {block[1]} "
                f"columns, which a refit does not quantize: serve at another tensor parallel size, or in bf16"
            )
