"""What vLLM's own loader would write where: ``load_weights`` run with tensors that have shapes, but no bytes.

The live parameters are set aside, and stand-ins on the meta device take their places, as vLLM made them before any processing.
Every copy that the loader then asks for is written down and not carried out; views keep their storage, offset and strides on the
meta device, so a copy says which box of which published tensor belongs where.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.boxes import Box
from reshard.errors import ReshardError


class TracedCopy(NamedTuple):
    """`box` of canonical tensor `name` goes to parameter `parameter`, its first element `offset` elements after the first.

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
    """The loader's copies and fills, and the canonical tensors that it asked for nothing of."""

    copies: list[TracedCopy]
    fills: list[TracedFill]
    unused: list[str]


def trace_load(model: torch.nn.Module, canonical: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Trace:
    """Run ``model.load_weights`` over canonical tensors (shape, dtype) without bytes.

    Raises ReshardError, naming the parameter, where the loader computes something instead of copying, and where it fails.
    """
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in canonical.items()}
    with _stand_ins(model) as parameters, torch.no_grad(), _Recorder(tensors, parameters) as recorder:
        try:
            model.load_weights(iter(tensors.items()))  # type: ignore[operator]
        except ReshardError:
            raise
        except Exception as error:
            raise ReshardError(f"vLLM's own loader refuses the model's tensors ({type(error).__name__}: {error})") from error
    return Trace(recorder.copies, recorder.fills, [name for name in tensors if name not in recorder.used])


@contextmanager
def _stand_ins(model: torch.nn.Module) -> Iterator[dict[int, str]]:
    """Set live tensors aside; yields the stand-ins' names by storage. What was there is put back, also after an error."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    names: dict[int, str] = {}
    aside = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    live = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    twins: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []
    try:
        for module, parameters, buffers in aside:
            info = LAYERWISE_INFO.get(module)
            templates: dict[str, torch.Tensor] = {}
            for some in info.restore_metadata if info is not None else ():
                templates |= some
            for here, held in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    # One stand-in for all the names of a tensor; those that vLLM derives while it processes have no template.
                    template = templates.get(name, tensor)
                    twin = twins.get(id(tensor))
                    if twin is None:
                        twin = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device="meta")
                        twin.__class__ = template.__class__
                        twin.__dict__ = dict(template.__dict__)
                        twins[id(tensor)] = restore_layer_refs(twin, module)
                        names[_storage(twin)] = live.get(id(tensor), name)
                    here[name] = twin  # type: ignore[assignment]
                    keep.append(twin)
        yield names
    finally:
        for module, parameters, buffers in aside:
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
        self.used: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to keep Dynamo out of it takes longer than the call itself

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

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        parameter = self._parameter(dst)
        found = self.sources.get(_storage(src))
        if found is None:
            what = self.derived.get(_storage(src), ("something else than a published tensor", src))[0]
            raise ReshardError(f"vLLM's loader writes {what} into {parameter}, which is no plain copy: refit does not support it")
        name, shape = found
        self.used.add(name)
        lengths, src_strides, dst_strides = _squeezed(src, dst)
        width = shape[-1] if shape else 1
        if len(shape) > 2 and src.is_contiguous() and dst.is_contiguous() and src.numel() == _volume(shape):
            lengths, src_strides, dst_strides = (src.numel(),), (1,), (1,)
        elif len(shape) == 2 and len(lengths) == 1:
            if src_strides == (1,):
                lengths, src_strides, dst_strides = (1, *lengths), (width, 1), (0, *dst_strides)
            else:
                lengths, src_strides, dst_strides = (*lengths, 1), (*src_strides, 1), (*dst_strides, 1)
        plain = (width, 1) if len(lengths) == 2 else (1,)
        if src.shape != dst.shape or src_strides != plain or dst_strides[-1:] not in ((1,), ()):
            raise ReshardError(f"vLLM's loader turns or spreads {name} on the way into {parameter}: refit does not support it")
        start = int(src.storage_offset())
        offsets: tuple[int, ...] = (start // width, start % width) if len(lengths) == 2 else (start,)
        pitch = dst_strides[0] if len(lengths) == 2 and lengths[0] > 1 else 0
        self.copies.append(TracedCopy(parameter, int(dst.storage_offset()), pitch, name, Box(offsets, tuple(lengths))))

    def _fill(self, dst: torch.Tensor, value: Any) -> None:
        parameter = self._parameter(dst)
        if value != 0 or not dst.is_contiguous():
            raise ReshardError(f"vLLM's loader fills a part of {parameter} with {value}: refit does not support it")
        if dst.numel():
            self.fills.append(TracedFill(parameter, int(dst.storage_offset()), dst.numel()))


def _volume(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _squeezed(src: torch.Tensor, dst: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Lengths, and strides on both sides, of the dims that are longer than one."""
    if src.shape != dst.shape:
        return tuple(src.shape), tuple(src.stride()), ()
    dims = [i for i, n in enumerate(src.shape) if n != 1] or ([0] if src.ndim else [])
    return (tuple(src.shape[i] for i in dims) or (1,), tuple(src.stride(i) for i in dims) or (1,),
            tuple(dst.stride(i) for i in dims) or (1,))  # fmt: skip
