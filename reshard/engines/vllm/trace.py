"""What vLLM's own loader would write where: ``load_weights`` run with tensors that have shapes, but no bytes.

The live parameters are set aside, and stand-ins on the meta device take their places, as vLLM made them
before any processing. Every copy that the loader then asks for is written down and not carried out; views
keep their storage, offset and strides on the meta device, so a copy says which box of which published tensor
belongs where.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.vllm.layers import bound_to, loading_templates, plain_templates, without_adapters


class TracedCopy(NamedTuple):
    """`box` of canonical tensor `name` goes to parameter `parameter`, its first element `offset` elements
    after the first.

    `pitch` is the distance between rows in elements, 0 for a single row.
    """

    parameter: str
    offset: int
    pitch: int
    name: str
    box: Box


class TracedFill(NamedTuple):
    """`elements` elements of a parameter, from element `offset` on, are set to zero."""

    parameter: str
    offset: int
    elements: int


class Trace(NamedTuple):
    """The loader's copies and fills."""

    copies: list[TracedCopy]
    fills: list[TracedFill]


# Shape and dtype of published tensors, by name.
Canonical = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def trace_load(model: torch.nn.Module, canonical: Canonical) -> Trace:
    """Run ``model.load_weights`` over canonical tensors (shape, dtype) without bytes.

    Raises ReshardError, naming the parameter, where the loader computes something instead of copying, and
    where it fails.
    """
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in canonical.items()
    }
    with (
        without_adapters(model),
        _stand_ins(model) as parameters,
        torch.no_grad(),
        _Recorder(tensors, parameters) as recorder,
    ):
        try:
            model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        except ReshardError:
            raise
        except Exception as error:
            raise ReshardError(
                f"vLLM's own loader refuses the model's tensors ({type(error).__name__}: {error})"
            ) from error
    return Trace(recorder.copies, recorder.fills)


@contextmanager
def _stand_ins(model: torch.nn.Module) -> Iterator[dict[int, str]]:
    """Set live tensors aside; yields the stand-ins' names by storage. What was there is put back, also after
    an error."""
    names: dict[int, str] = {}
    aside = [
        (path, module, dict(module._parameters), dict(module._buffers))
        for path, module in model.named_modules()
    ]
    live = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    twins: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []
    try:
        for path, module, parameters, buffers in aside:
            templates, plain = loading_templates(module), plain_templates(module)
            for name in [one for one in parameters if one.startswith(tuple(plain))]:
                del module._parameters[name]  # codes, and what belongs to them
            for name, unquantized in plain.items():
                bound = bound_to(unquantized, module)
                names[_storage(bound)] = f"{path}.{name}"
                module._parameters[name] = bound  # type: ignore[assignment]
                keep.append(bound)
            for here, held in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in held.items():
                    if name.startswith(tuple(plain)):
                        continue
                    # One stand-in for all the names of a tensor; those that vLLM derives while it processes
                    # have no template. What it has packed into something else has nothing but that.
                    template = templates.get(name, tensor)
                    if template is None:
                        continue
                    twin = twins.get(id(tensor)) if tensor is not None else None
                    if twin is None:
                        twin = torch.empty_strided(
                            template.shape, template.stride(), dtype=template.dtype, device="meta"
                        )
                        twin.__class__ = template.__class__
                        twin.__dict__ = dict(template.__dict__)
                        if tensor is not None:
                            twins[id(tensor)] = twin
                        twin = bound_to(twin, module)
                        names[_storage(twin)] = live.get(id(tensor), f"{path}.{name}")
                    here[name] = twin  # type: ignore[assignment]
                    keep.append(twin)
        yield names
    finally:
        for _, module, parameters, buffers in aside:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: dict[str, torch.Tensor], parameters: dict[int, str]) -> None:
        super().__init__()
        self.sources = {_storage(tensor): (name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.parameters = parameters
        self.derived: dict[int, tuple[str, torch.Tensor]] = {}
        self.copies: list[TracedCopy] = []
        self.fills: list[TracedFill] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and to keep Dynamo out of it takes longer than the call itself
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._fill(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        out = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(out, torch.Tensor) and not func.is_view:
            # A new tensor made of a canonical one: a copy of it could not be traced to a box.
            for arg in args:
                found = self.sources.get(_storage(arg)) if isinstance(arg, torch.Tensor) else None
                if found is not None and _storage(out) not in self.sources:
                    self.derived[_storage(out)] = (f"{func} of {found[0]}", out)
        return out

    def _parameter(self, dst: torch.Tensor) -> str:
        name = self.parameters.get(_storage(dst))
        if name is None:
            raise ReshardError("vLLM's loader writes into a tensor that is none of the model's parameters")
        return name

    def _published(self, src: torch.Tensor, parameter: str) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the canonical tensor that `src` is a view of."""
        found = self.sources.get(_storage(src))
        if found is None:
            what = self.derived.get(_storage(src), ("something else than a published tensor", src))[0]
            raise ReshardError(
                f"vLLM's loader writes {what} into {parameter}, which is no plain copy: "
                f"refit does not support it"
            )
        return found

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        parameter = self._parameter(dst)
        name, shape = self._published(src, parameter)
        does = f"vLLM's loader turns or spreads {name} on the way into {parameter}"
        turned = ReshardError(f"{does}: refit does not support it")
        if src.shape != dst.shape:
            raise turned
        width = shape[-1] if shape else 1
        view = _view(shape, src, dst)
        in_rows = len(view.lengths) == 2
        if view.src_strides != ((width, 1) if in_rows else (1,)) or view.dst_strides[-1] != 1:
            raise turned
        start = int(src.storage_offset())
        offsets: tuple[int, ...] = (start,)
        pitch = 0
        if in_rows:
            offsets = (start // width, start % width)
            if view.lengths[0] > 1:
                pitch = view.dst_strides[0]
        box = Box(offsets, view.lengths)
        self.copies.append(TracedCopy(parameter, int(dst.storage_offset()), pitch, name, box))

    def _fill(self, dst: torch.Tensor, value: Any) -> None:
        parameter = self._parameter(dst)
        if value != 0 or not dst.is_contiguous():
            raise ReshardError(
                f"vLLM's loader fills a part of {parameter} with {value}: refit does not support it"
            )
        if dst.numel():
            self.fills.append(TracedFill(parameter, int(dst.storage_offset()), dst.numel()))


class _View(NamedTuple):
    """The elements of a copy, as a run or as rows: lengths, and strides on both sides, in elements."""

    lengths: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]


def _view(shape: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> _View:
    """A copy between views of one shape, `src` of a canonical tensor of `shape`: all of a tensor of three
    dims or more as a run, what is of a matrix as rows, and other parts by the dims that are longer than
    one."""
    is_whole = src.numel() == torch.Size(shape).numel() and src.is_contiguous() and dst.is_contiguous()
    if len(shape) > 2 and is_whole:
        return _View((src.numel(),), (1,), (1,))
    long = _long_dims(src, dst)
    if len(shape) != 2 or len(long.lengths) != 1:
        return long
    [length], [src_stride], [dst_stride] = long
    if src_stride == 1:  # a part of one row
        return _View((1, length), (shape[-1], 1), (0, dst_stride))
    return _View((length, 1), (src_stride, 1), (dst_stride, 1))  # a part of one column


def _long_dims(src: torch.Tensor, dst: torch.Tensor) -> _View:
    """By the dims that are longer than one; by the first of all where none is."""
    dims = [dim for dim, length in enumerate(src.shape) if length != 1]
    if not dims and src.ndim:
        dims = [0]
    if not dims:
        return _View((1,), (1,), (1,))
    lengths = tuple(src.shape[dim] for dim in dims)
    return _View(lengths, tuple(src.stride(dim) for dim in dims), tuple(dst.stride(dim) for dim in dims))
