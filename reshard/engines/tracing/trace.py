"""A record of what an engine's own loader would write where, made by running it with tensors that
have shapes, but no bytes.

The engine puts stand-ins on the meta device in the places of its parameters, as it made them before
any processing. Every copy that its loader then asks for is written down and not carried out. Views
keep their storage, offset and strides on the meta device, so a copy tells which box of which
published tensor belongs where.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.engines.tracing.rows import place_of
from reshard.models.row_runs import runs_of_rows, storage_id


class TracedCopy(NamedTuple):
    """A copy of `box` of the published tensor `name` into `parameter`, whose first element goes to
    element `offset`.

    `pitch` is the distance between rows in elements, 0 for a single row; of a vector that between
    elements, 0 if they follow one another. A box of which the loader turns or spreads rows has
    all dims of its tensor, and `strides`: how far apart neighbors along each lie in the parameter.
    """

    parameter: str
    offset: int
    pitch: int
    name: str
    box: Box
    strides: tuple[int, ...] = ()


class TracedFill(NamedTuple):
    """Zeros in `elements` elements of a parameter, from element `offset` on."""

    parameter: str
    offset: int
    elements: int


class Trace(NamedTuple):
    """The loader's copies and fills, in its order."""

    copies: list[TracedCopy]
    fills: list[TracedFill]


# Shape and dtype of published tensors, by name.
Canonical = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
# Takes (published name, tensor) one after the other, as an engine's loader does.
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], Any]


def trace_load(
    engine: str,
    load: Load,
    canonical: Canonical,
    parameters: Mapping[int, str],
    computed: Collection[str] = (),
) -> Trace:
    """Return what `load` would copy and fill, given canonical tensors (shape, dtype) without bytes.

    `parameters` are the names of the stand-ins that the loader writes into, by `storage_id`. Into
    those named in `computed`, which the engine makes anew after a refit, it may compute something, or copy
    another parameter, which is not recorded; inside `own_loader` also something of a published tensor, element by
    element, which is recorded as a copy. `engine` names the engine in errors. Raises ReshardError, naming
    the parameter, if the loader computes something instead of copying, and if it fails.
    """
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in canonical.items()
    }
    with torch.no_grad(), _Recorder(engine, tensors, parameters, computed) as recorder:
        try:
            load(iter(tensors.items()))
        except ReshardError:
            raise
        except Exception as error:
            raise ReshardError(
                f"{engine}'s own loader refuses the model's tensors ({type(error).__name__}: {error})"
            ) from error
    return Trace(recorder.copies, recorder.fills)


_in_own_loader: ContextVar[bool] = ContextVar("in_own_loader", default=False)


@contextmanager
def own_loader() -> Iterator[None]:
    """Inside, the loader of a parameter that the engine makes anew runs: what it computes of a published tensor,
    element by element, it computes again of what a refit has written."""
    token = _in_own_loader.set(True)
    try:
        yield
    finally:
        _in_own_loader.reset(token)


# What makes a tensor of zeros, and what computes each element of a tensor from that element alone.
MAKES_ZEROS = (
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
)
ELEMENT_BY_ELEMENT = (torch.ops.aten.exp.default, torch.ops.aten.neg.default)
# Dtypes that have each value of another.
WIDER = {
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32,),
}


class _Recorder(TorchDispatchMode):
    """Records the copies of canonical `tensors` into `parameters`, which are names by storage."""

    def __init__(
        self,
        engine: str,
        tensors: dict[str, torch.Tensor],
        parameters: Mapping[int, str],
        computed: Collection[str],
    ) -> None:
        super().__init__()
        self.computed = computed
        self.of_itself: dict[int, tuple[str, torch.Tensor]] = {}  # by storage: made of a parameter
        self.engine = engine
        self.sources = {storage_id(tensor): (name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.parameters = parameters
        self.derived: dict[int, tuple[str, torch.Tensor]] = {}
        self.zeroed: set[int] = set()  # storages of tensors that the loader has made, or filled, with zeros
        self.computed_of: dict[int, str] = {}  # by storage: what computes its elements of published ones
        # By storage: runs of rows of published tensors that the loader has put one below the other.
        self.joined: dict[int, list[torch.Tensor]] = {}
        # By storage: numbers without memory whose values are known, as which experts are this rank's.
        self.known: dict[int, torch.Tensor] = {}
        # By storage, kept, since tensors are known by these: what lies in another order than the loader may believe.
        self.clones: dict[int, torch.Tensor] = {}
        self.dtypes = {storage_id(tensor): tensor.dtype for tensor in tensors.values()}
        self.copies: list[TracedCopy] = []
        self.fills: list[TracedFill] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and keeping Dynamo out of it takes longer than the call itself.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._fill(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if func is torch.ops.aten.clone.default and self._is_published(args[0]):
            return self._clone(args[0], args[0].dtype)
        if func is torch.ops.aten._to_copy.default and self._widens(args[0], **(kwargs or {})):
            return self._clone(args[0], (kwargs or {})["dtype"])
        if func in ELEMENT_BY_ELEMENT and self._follows(args[0]):
            return self._compute(func, args[0])
        if func is torch.ops.aten._unsafe_view.default and not args[0].is_contiguous():
            shape = self.sources[storage_id(args[0])][1] if self._is_published(args[0]) else ()
            runs = runs_of_rows(args[0], shape, args[1])
            if runs:
                return self._join(runs)
        if func is torch.ops.aten.as_strided.default and storage_id(args[0]) in self.clones:
            raise ReshardError(
                f"{self.engine}'s loader asks for elements by where they lie in a copy of a tensor (as_strided): refit "
                f"does not support it"
            )
        if func is torch.ops.aten.cat.default and self._joins_rows(*args):
            return self._join(args[0])
        if func is torch.ops.aten.index.Tensor:
            taken = self._taken(*args)
            if taken is not None:
                return taken
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._value(args[0])
        if func._schema.is_mutable:
            self._check_written(func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        copies = func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
        if func in MAKES_ZEROS or (copies and storage_id(args[0]) in self.zeroed):
            self.zeroed.add(storage_id(out))
            self.clones[storage_id(out)] = out
            return out
        if func is torch.ops.aten._to_copy.default and out.is_meta and not args[0].is_meta:
            if args[0].is_contiguous():
                self.known[storage_id(out)] = args[0].flatten()
            self.clones[storage_id(out)] = out
        if isinstance(out, torch.Tensor) and not func.is_view:
            # A new tensor made of a canonical one: a copy of it could not be traced to a box.
            for arg in args:
                self._note_parameter(arg, out)
                source = self.sources.get(storage_id(arg)) if isinstance(arg, torch.Tensor) else None
                if source is not None and storage_id(out) not in self.sources:
                    self.derived[storage_id(out)] = (f"{func} of {source[0]}", out)
        return out

    def _value(self, tensor: torch.Tensor) -> Any:
        """Return a number that a loader asks for. Raises ReshardError if it is not known, as that of a weight."""
        known = self.known.get(storage_id(tensor))
        if known is None:
            name = self.sources.get(storage_id(tensor), ("a tensor", ()))[0]
            raise ReshardError(
                f"{self.engine}'s loader computes with the value of {name}, which is not a plain copy: refit does not "
                f"support it"
            )
        return known[tensor.storage_offset()].item()

    def _note_parameter(self, arg: Any, out: torch.Tensor) -> None:
        """Note a tensor that is made of a parameter that the loader may compute in place."""
        storage = storage_id(arg) if isinstance(arg, torch.Tensor) else 0
        name = self.of_itself.get(storage, (self.parameters.get(storage), arg))[0]
        if name is not None and name in self.computed:
            self.of_itself[storage_id(out)] = (name, out)

    def _check_written(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise ReshardError if an operation other than a copy writes into a parameter, or into what is copied."""
        for number, argument in enumerate(func._schema.arguments):
            if not argument.is_write:
                continue
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            for written in value if isinstance(value, list | tuple) else [value]:
                if isinstance(written, torch.Tensor):
                    self._check_not_computed(func, storage_id(written))
                    self.zeroed.discard(storage_id(written))
                    self.known.pop(storage_id(written), None)

    def _check_not_computed(self, func: Any, written: int) -> None:
        name = self.parameters.get(written)
        if name is not None and name not in self.computed:
            raise ReshardError(
                f"{self.engine}'s loader computes {name} by {func}, which is not a plain copy: refit does not "
                f"support it"
            )
        joined = self.joined.get(written)
        source = self.sources.get(written if joined is None else storage_id(joined[0]))
        if source is not None:
            raise ReshardError(
                f"{self.engine}'s loader computes with {source[0]} by {func}, which is not a plain copy: refit does "
                f"not support it"
            )

    def _follows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a parameter's own loader computes something of this tensor, a published one in fp32: in another
        dtype it would round otherwise than of what a refit has written."""
        storage = storage_id(tensor)
        is_published = self._is_published(tensor) and storage not in self.zeroed
        return _in_own_loader.get() and is_published and tensor.dtype is torch.float32

    def _compute(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor each of whose elements `func` makes of one of a published one."""
        out = self._clone(tensor, tensor.dtype)
        self.computed_of[storage_id(out)] = f"{func} of {self.sources[storage_id(tensor)][0]}"
        return out

    def _widens(self, tensor: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> bool:
        """Tell whether a published tensor is put into a dtype that has each of its values."""
        return self._is_published(tensor) and dtype in WIDER.get(tensor.dtype, ())

    def _is_published(self, tensor: torch.Tensor) -> bool:
        """Tell whether these are elements of a published tensor, and not their bits as other numbers."""
        same = tensor.dtype == self.dtypes.get(storage_id(tensor)) and not tensor.is_neg()
        return same and storage_id(tensor) in self.sources

    def _clone(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with the same elements of a published one. They lie as they do there, since that
        says which they are, and not as the loader asks."""
        source = storage_id(tensor)
        elements = prod(self.sources[source][1])
        clone = torch.empty(elements, dtype=dtype, device="meta")
        clone = clone.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self.clones[storage_id(clone)] = clone
        self.dtypes[storage_id(clone)] = dtype
        self.sources[storage_id(clone)] = self.sources[source]
        if source in self.zeroed:
            self.zeroed.add(storage_id(clone))
        if source in self.computed_of:
            self.computed_of[storage_id(clone)] = self.computed_of[source]
        return clone

    def _taken(self, tensor: torch.Tensor, indexes: list[torch.Tensor | None]) -> torch.Tensor | None:
        """Return what a loader takes of a published tensor by indexes along its first dim, as which experts are this
        rank's; None if the indexes are not known, or not as far apart each."""
        if len(indexes) != 1 or indexes[0] is None or not self._is_published(tensor):
            return None
        known = self.known.get(storage_id(indexes[0]))
        if (
            known is None
            or known.dtype != torch.int64
            or known.numel() != indexes[0].numel()
            or indexes[0].ndim != 1
        ):
            return None
        steps = set(known.diff().tolist())
        if not known.numel() or len(steps) > 1 or min(steps, default=1) < 1 or int(known[0]) < 0:
            return None
        first, step = int(known[0]), min(steps, default=1)
        stop = int(known[-1]) + 1
        return self._clone(tensor[first:stop:step], tensor.dtype) if stop <= tensor.shape[0] else None

    def _joins_rows(self, tensors: list[torch.Tensor], dim: int = 0) -> bool:
        """Tell whether these are rows of published matrices, or runs of vectors, to be put one below the other."""
        return dim == 0 and all(map(self._is_rows, tensors))

    def _is_rows(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is whole rows of a published matrix that follow one another, a run of a vector, or all of
        what the loader has joined."""
        start, parts = int(tensor.storage_offset()), self.joined.get(storage_id(tensor))
        if parts is not None:
            rows = sum(part.shape[0] for part in parts)
            return tensor.is_contiguous() and tuple(tensor.shape) == (rows, *parts[0].shape[1:])
        shape = self.sources[storage_id(tensor)][1] if self._is_published(tensor) else ()
        is_like = len(shape) in (1, 2) and tensor.ndim == len(shape) and tuple(tensor.shape[1:]) == shape[1:]
        return is_like and tensor.is_contiguous() and start % prod(shape[1:]) == 0

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        tensors = [part for tensor in tensors for part in self.joined.get(storage_id(tensor), [tensor])]
        rows = sum(tensor.shape[0] for tensor in tensors)
        joined = torch.empty((rows, *tensors[0].shape[1:]), dtype=tensors[0].dtype, device="meta")
        # As they are now: the loader may make zeros of one later.
        self.joined[storage_id(joined)] = [self._clone(tensor, tensor.dtype) for tensor in tensors]
        self.clones[storage_id(joined)], self.dtypes[storage_id(joined)] = joined, joined.dtype
        return joined

    def _copy_joined(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Record a copy of rows, or parts of rows, of joined matrices, or of a part of joined vectors, as one of
        each of them."""
        like = self.joined[storage_id(src)][0]
        width = like.shape[1] if like.ndim == 2 else 1
        self._check_numbers(src, "joined matrices", self._parameter(dst))
        if src.shape != dst.shape or src.stride() != ((width, 1) if like.ndim == 2 else (1,)):
            raise ReshardError(
                f"{self.engine}'s loader turns or spreads joined matrices on the way into "
                f"{self._parameter(dst)}: refit does not support it"
            )
        start, column = divmod(int(src.storage_offset()), width)
        end, first = start + src.shape[0], 0
        for tensor in self.joined[storage_id(src)]:
            low, high = max(start, first), min(end, first + tensor.shape[0])
            if low < high:
                part = tensor[low - first : high - first]
                if src.ndim == 2:
                    part = part[:, column : column + src.shape[1]]
                self._copy(dst[low - start : high - start], part)
            first += tensor.shape[0]

    def _check_numbers(self, src: torch.Tensor, name: str, parameter: str) -> None:
        """Raise ReshardError if the bits of a tensor are taken for those of other numbers."""
        if src.dtype != self.dtypes[storage_id(src)] or src.is_neg():
            raise ReshardError(
                f"{self.engine}'s loader takes the bits of {name} for those of other numbers on the way into "
                f"{parameter}: refit does not support it"
            )

    def _parameter(self, dst: torch.Tensor) -> str:
        name = self.parameters.get(storage_id(dst))
        if name is None:
            raise ReshardError(
                f"{self.engine}'s loader writes into a tensor that is not one of the model's parameters"
            )
        return name

    def _published(self, src: torch.Tensor, parameter: str) -> tuple[str, tuple[int, ...]]:
        """Return name and shape of the canonical tensor that `src` is a view of."""
        source, computed = self.sources.get(storage_id(src)), self.computed_of.get(storage_id(src))
        if source is None or (computed is not None and parameter not in self.computed):
            unknown = "something else than a published tensor", src
            computed = computed or self.derived.get(storage_id(src), unknown)[0]
            raise ReshardError(
                f"{self.engine}'s loader writes {computed} into {parameter}, which is not a plain copy: "
                f"refit does not support it"
            )
        return source

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if storage_id(src) in self.joined:
            self._copy_joined(dst, src)
            return
        parameter = self._parameter(dst)
        if self.of_itself.get(storage_id(src), ("", src))[0] == parameter:
            return
        if parameter in self.computed and storage_id(src) in self.parameters:
            return  # made of another parameter
        if storage_id(src) in self.zeroed and storage_id(src) not in self.sources:
            self._fill_with(dst, src)
            return
        name, shape = self._published(src, parameter)
        if src.shape != dst.shape:
            raise turned(self.engine, name, parameter)
        self._check_numbers(src, name, parameter)
        if storage_id(src) in self.zeroed:
            self._fill(dst, 0)
            return
        place = place_of(shape, src, dst)
        if place is None:
            raise turned(self.engine, name, parameter)
        box, pitch, strides = place
        self.copies.append(TracedCopy(parameter, int(dst.storage_offset()), pitch, name, box, strides))

    def _fill_with(self, dst: torch.Tensor, zeros: torch.Tensor) -> None:
        """Record a copy of zeros that the loader has made itself. Raises ReshardError if it has changed them since, or
        puts them over something that it has copied before."""
        parameter, first = self._parameter(dst), int(dst.storage_offset())
        if zeros.device.type != "meta" and bool(zeros.count_nonzero()):
            raise ReshardError(
                f"{self.engine}'s loader changes zeros that it has made for {parameter}: refit does not support it"
            )
        for copy in self.copies:
            if copy.parameter == parameter and copy.offset < first + dst.numel() and first < _end(copy):
                raise ReshardError(
                    f"{self.engine}'s loader puts zeros over {copy.name} in {parameter}: refit does not support it"
                )
        self._fill(dst, 0)

    def _fill(self, dst: torch.Tensor, value: Any) -> None:
        source = self.sources.get(storage_id(dst))
        if source is not None and value == 0 and tuple(dst.shape) == source[1]:
            self.zeroed.add(storage_id(dst))
            return
        if not dst.numel():  # as the padding of sinks of a rank that has none
            return
        parameter = self._parameter(dst)
        if value != 0 or not dst.is_contiguous():
            raise ReshardError(
                f"{self.engine}'s loader fills a part of {parameter} with {value}: refit does not support it"
            )
        self.fills.append(TracedFill(parameter, int(dst.storage_offset()), dst.numel()))


def _end(copy: TracedCopy) -> int:
    """Return an offset in the parameter behind all elements that a copy writes."""
    if copy.strides:
        steps = zip(copy.box.lengths, copy.strides, strict=True)
        return copy.offset + sum((length - 1) * stride for length, stride in steps) + 1
    rows, *row = copy.box.lengths
    return copy.offset + (rows - 1) * (copy.pitch or prod(row)) + prod(row)


def turned(engine: str, name: str, parameter: str) -> ReshardError:
    """Return the error for a copy whose elements are not rows on both sides."""
    return ReshardError(
        f"{engine}'s loader turns or spreads {name} on the way into {parameter}: refit does not support it"
    )
