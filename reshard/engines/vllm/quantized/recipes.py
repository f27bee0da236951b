"""The making of a layer's parameters, as vLLM loads them from a quantized checkpoint, of plain
weights: what all schemes share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import tensor_parallel
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.quantized.layers import NVFP4, Compressed
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
    """A part of a parameter: the published tensor's name and shape, the box of it, and the part's
    first row, with experts below each other."""

    parameter: str
    name: str
    shape: tuple[int, ...]
    box: Box
    row: int


class LayerQuantizer(ABC):
    """Makes a layer's parameters, as vLLM would load them from a checkpoint, of plain weights.

    `templates` are all parameters of the layer as vLLM made them. `input_scales` come with a
    checkpoint and stay.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        how: Compressed,
        templates: Mapping[str, torch.Tensor],
        input_scales: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.module, self.how = name, module, how
        self.templates, self.input_scales = templates, input_scales
        self.scheme = scheme_of(how)
        # Matrices of which other tensor parallel ranks hold parts with the same scales.
        self.split_matrices: set[str] = set()
        self.find_matrices()

    @abstractmethod
    def find_matrices(self) -> None:
        """Find which parameters belong to which matrix. Raises ReshardError if vLLM keeps them
        in an unknown way."""

    @property
    @abstractmethod
    def encoded_names(self) -> set[str]:
        """Return the names of the parameters that are made of plain weights."""

    @abstractmethod
    def find_split_matrices(self, held: Sequence[Held]) -> None:
        """Add the matrices that other ranks hold parts of to `split_matrices`.

        Raises ReshardError if what shares a scale cannot be quantized.
        """

    @abstractmethod
    def largest_magnitudes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the largest magnitude of all that shares a scale, among the plain `values`, in
        fp32, by matrix."""

    @abstractmethod
    def encode(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the parameters `encoded_names` and their scales, from plain `values` and the largest
        magnitudes of all ranks."""

    @property
    def plain_names(self) -> list[str]:
        """Return the names of the parameters that a refit fills and that vLLM would load as they
        are, such as biases."""
        others = () if self.how.packed is None else self.how.packed.others
        made = {*self.input_scales, *self.encoded_names, *others}
        return [key for key in self.templates if key not in made]

    def find_split(self, held: Sequence[Held]) -> None:
        """Find the matrices that are split over ranks, from the parts that this rank holds.

        Raises ReshardError if parts of two published tensors would share a scale, and if
        ranks cannot find scales together.
        """
        self.find_split_matrices(held)
        experts, (ranks, _) = experts_of(self.module), tensor_parallel()
        if self.split_matrices and experts is not None and experts.tp != ranks:
            raise ReshardError(
                f"{self.name} splits its experts over {experts.tp} ranks, not over the {ranks} of tensor "
                "parallelism, and those cannot find scales together: pass enable_expert_parallel=True, or "
                "serve in bf16"
            )

    def parameters(
        self, values: Mapping[str, torch.Tensor], largest: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the layer's parameters as vLLM would have loaded them, of plain `values` and the
        largest magnitudes of all ranks."""
        device = next(iter(values.values())).device
        parameters = {key: values[key] for key in self.plain_names}
        for key in () if self.how.packed is None else self.how.packed.others:
            if key in self.templates:  # what no kernel reads
                template = self.templates[key]
                parameters[key] = parameter_like(
                    torch.zeros(template.shape, dtype=template.dtype, device=device), template
                )
        for key, value in self.input_scales.items():
            template = self.templates[key]
            parameters[key] = parameter_like(value.expand(template.shape).clone(), template)
        return parameters | self.encode(values, largest)


def parameter_like(tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    """Return the tensor, as a parameter of the template's class and attributes."""
    tensor.__class__ = template.__class__
    tensor.__dict__ = dict(template.__dict__)
    return tensor


def reduce_max(vectors: Sequence[torch.Tensor], group: Any, timeout: float) -> None:
    """Replace each element by the largest of all ranks in the group, which have as many vectors in
    the same order.

    Waits no longer than `timeout` seconds; on a GPU, enqueues it on the current stream.
    """
    if not vectors:
        return
    joined = torch.cat(list(vectors))
    work = dist.all_reduce(joined, dist.ReduceOp.MAX, group, async_op=True)
    if joined.device.type == "cpu":
        work.wait(timedelta(seconds=timeout))
    else:
        work.wait()
    for vector, largest in zip(vectors, joined.split([len(one) for one in vectors]), strict=True):
        vector.copy_(largest)


def refuse_parts_of_blocks(what: str, block: tuple[int, int], rows: int, parts: Sequence[Held]) -> None:
    """Raise ReshardError if a rank holds a part of a block that shares a scale, or if the
    blocks of a published tensor are not those of the matrix, of so many `rows`, that it lies in."""
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
                f"{what} has a part of {part.name} that begins or ends within what has one scale, {block[0]} "
                f"rows and {block[1]} columns, which a refit does not quantize: serve at another tensor "
                "parallel size, or in bf16"
            )
