"""Weights that an engine hands on as it serves them: codes, scales, and what is arranged for its kernels.

A twin of an engine's rank is another engine's rank of the same arrangement. What a refit writes into the one, or has it
derive, is copied to the other tensor by tensor, byte by byte, whatever it means. So an engine says its `Arrangement` as
facts of its weights (`Holder.facts`), and who is to get them compares it with its own: what differs is named, and
nothing is copied.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch

from reshard.core.boxes import whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.models.model import Model
from reshard.refit.engine import Engine
from reshard.refit.lora.sides import AdaptedEngine, AdapterEngine
from reshard.refit.protocol.encoding import pack_json, readable, unpack_json
from reshard.refit.served import ServedWeights

TWINS = b"twins "  # begins facts that say an arrangement; others are compressed
BYTES = torch.uint8


@dataclass(frozen=True)
class Arrangement:
    """The form in which one rank of an engine serves its weights.

    `rank` says which part of the model it holds, the same for the same part. `facts` are what else has to be the same,
    by layer or setting, such as the kernels and what these keep beside tensors. `tensors` are the dtype, the shape and
    the strides of each that is copied, by name. `optional` are the published names of `Engine.optional` that it has
    taken. `views` are the dtype, the shape and the strides of each tensor that lies within another, by name, and then
    at which byte of which one. `published` is what it says of the published weights (`Holder.facts`), such as of a
    drafter; empty for nothing.
    """

    rank: str
    facts: dict[str, str]
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    optional: list[str] = field(default_factory=list)
    views: dict[str, list[Any]] = field(default_factory=dict)
    published: bytes = b""

    def encode(self) -> bytes:
        """Return what `arrangements_in` reads."""
        return TWINS + pack_json(vars(self) | {"published": b64encode(self.published).decode()})

    def difference(self, other: "Arrangement") -> str:
        """Return the first thing in which another one differs, with both values; empty if it is the same."""
        for kind in ("facts", "tensors", "views"):
            own, theirs = getattr(self, kind), getattr(other, kind)
            for name in [*own, *(name for name in theirs if name not in own)]:
                if own.get(name) != theirs.get(name):
                    return f"{name} is {_said(own.get(name))} here, and {_said(theirs.get(name))} there"
        return ""


def _said(value: Any) -> str:
    """Return a fact, or the dtype, shape, strides and place of a tensor, for an error."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value
    dtype, shape, strides, *place = value
    within = f" at byte {place[0]} of {place[1]}" if place else ""
    return f"{dtype} {shape} with strides {strides}{within}"


@runtime_checkable
class TwinEngine(Protocol):
    """An engine's rank whose weights can be handed on as it serves them."""

    def arranged_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all that a refit writes, or has the engine derive, by name, where it is now; several names may be of
        the same memory. Raises ReshardError, with what to do, if some of it is in no tensor."""

    def arrangement(self) -> Arrangement:
        """Return the arrangement, without its tensors and optional names."""

    def restore_left_alone(self) -> None:
        """Write what the engine has lost of what a refit leaves alone."""


class Rows(NamedTuple):
    """The memory of a tensor: rows of so many bytes, and the bytes from one row to the next."""

    rows: int
    width: int
    pitch: int


def rows_of(name: str, tensor: torch.Tensor) -> Rows:
    """Return the memory of a tensor, whatever the order of its dims. Raises ReshardError if these are no rows."""
    size = tensor.element_size()
    dims = [
        (stride, length)
        for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
        if length > 1 and stride > 0  # else one number stands for many
    ]
    rows, width, pitch = 1, 1, 0
    for stride, length in sorted(dims):
        if rows == 1 and stride == width:
            width *= length
        elif rows == 1 and stride > width:
            rows, pitch = length, stride
        elif rows > 1 and stride == rows * pitch:
            rows *= length
        else:
            raise ReshardError(
                f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}, which are no rows, so "
                "that it is not handed on as it is: give a trainer"
            )
    return Rows(rows, width * size, (pitch or width) * size)


def bytes_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the memory of a tensor, from its first byte to its last, as a view."""
    count = ((rows.rows - 1) * rows.pitch + rows.width) // tensor.element_size()
    plain = tensor.detach().as_subclass(torch.Tensor)
    return plain.as_strided((count,), (1,)).view(BYTES)


def described(tensor: torch.Tensor) -> list[Any]:
    """Return the dtype, the shape and the strides of a tensor; that of a single element means nothing."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride if length > 1 else 1 for length, stride in dims]
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), strides]


class Span(NamedTuple):
    """The memory of a tensor, from its first byte to the one behind its last."""

    start: int
    end: int
    name: str
    rows: Rows


def _spans(tensors: Mapping[str, torch.Tensor]) -> list[Span]:
    """Return the memory of tensors that have any, by where it begins; of what begins together first the largest, then
    what has no gaps, then in their order."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            rows = rows_of(name, tensor)
            start = tensor.data_ptr()
            spans.append(Span(start, start + (rows.rows - 1) * rows.pitch + rows.width, name, rows))
    return sorted(spans, key=lambda span: (span.start, -span.end, span.rows.rows))


def without_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, Rows]:
    """Return the memory of tensors that have any, by name; one name for what several views are of."""
    kept: dict[str, Rows] = {}
    end = 0  # of what is kept without gaps
    for span in _spans(tensors):
        if span.end <= end:
            continue
        kept[span.name] = span.rows
        if span.rows.rows == 1:
            end = max(end, span.end)
    return {name: kept[name] for name in tensors if name in kept}


def views_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return the tensors that lie within what others span, or begin there, by name: what `described` returns, and then
    at which byte of which tensor. That is the first of those whose memory overlaps."""
    views: dict[str, list[Any]] = {}
    first, end = Span(0, 0, "", Rows(0, 0, 0)), 0
    for span in _spans(tensors):
        if span.start < end:
            views[span.name] = [*described(tensors[span.name]), span.start - first.start, first.name]
        else:
            first = span
        end = max(end, span.end)
    return {name: views[name] for name in tensors if name in views}


class Twin(Engine):
    """What one rank of an engine serves, as it serves it: as a source for its twins, or as such a twin.

    Its canonical tensors are bytes, ``[rows, bytes in a row]``, whose names begin with the rank's `Arrangement.rank`.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, TwinEngine):
            raise ReshardError(
                f"this {engine.guard.engine} takes no weights in the form in which another engine serves them: give a "
                "trainer, or an engine without quantization"
            )
        self.engine, self.guard, self.hf_config, self.tp = engine, engine.guard, engine.hf_config, engine.tp
        arrangement, tensors = engine.arrangement(), engine.arranged_tensors()
        memory = without_views(tensors)
        held = {part.name for tensor in engine.placement.tensors.values() for part in tensor.parts}
        self.arrangement = Arrangement(
            arrangement.rank,
            arrangement.facts,
            {name: described(tensors[name]) for name in memory},
            sorted(engine.optional & held),
            views_in(tensors),
            engine.facts() or b"",
        )
        self._memory = memory
        shapes = {self._canonical(name): (rows.rows, rows.width) for name, rows in memory.items()}
        self.placement = Placement.of(
            shapes,
            (
                LocalTensor(name, shape, (Part(self._canonical(name), whole(shape), (0, 0)),))
                for name, shape in zip(memory, shapes.values(), strict=True)
            ),
        )
        self._take(tensors)

    @property
    def _twin(self) -> TwinEngine:
        return cast(TwinEngine, self.engine)

    def _canonical(self, name: str) -> str:
        return f"{self.arrangement.rank}: {name}"

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors for what is to be read or written from now on."""
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.regions = {
            name: Region(bytes_of(tensors[name], rows), 0, rows.pitch) for name, rows in self._memory.items()
        }

    @property
    def taken(self) -> object:
        """What stays the same until the engine takes other weights."""
        return self.engine.taken

    def refresh_regions(self) -> None:
        """Find the tensors that the engine has replaced or moved. Raises ReshardError if it has others now, or a view
        of one lies elsewhere."""
        self.engine.refresh_regions()
        tensors = self._twin.arranged_tensors()
        if {name: tensor.data_ptr() for name, tensor in tensors.items()} != self._addresses:
            if without_views(tensors) != self._memory or views_in(tensors) != self.arrangement.views:
                raise ReshardError(
                    f"this {self.guard.engine} keeps its weights in other tensors than at connect: connect again"
                )
            self._take(tensors)

    # As a source

    def check_as_published(self) -> None:
        """Nothing: what is handed on is not what was published."""

    def facts(self) -> bytes:
        """Return the arrangement, which those that get these bytes have to have, too."""
        return self.arrangement.encode()

    def check_model(self, model: Model) -> None:
        """Raise ReshardError if the published config that the engine serves is of another model."""
        self.engine.check_model(model)

    # As the twin of a source

    def check_arranged_as(self, offered: Mapping[str, Arrangement]) -> None:
        """Raise ReshardError, with what differs, unless what is offered, by the names of those that offer it, is
        arranged as this rank's weights are."""
        own = self.arrangement
        alike = {who: one for who, one in offered.items() if one.rank == own.rank}
        differences = [(who, own.difference(one)) for who, one in alike.items()]
        if not alike:
            who, other = next(iter(offered.items()))
            # What has to be the same beside tensors is told by arrangements alone, which no rank there has for a part
            # that is served as it was published.
            differences = [
                (
                    who,
                    f"this rank has {own.rank}, and no rank there has that, but {other.rank}"
                    if self.engine.not_as_published()
                    else f"this rank has {own.rank} as it was published, or no tensor, and no rank there has that in a "
                    "form of its own; engines that have one on some ranks alone hand on nothing",
                )
            ]
        for who, difference in differences:
            if difference:
                raise ReshardError(
                    f"{who} serves weights in a form of its own, which only an engine gets that serves them alike: "
                    f"{difference}; start both alike, or wait for what a trainer sends"
                )

    def begin(self) -> None:
        """Refuse to serve until `end`."""
        self.engine.begin()

    def end(self, version: int) -> None:
        """Serve again, with weights of this version."""
        self.engine.end(version)

    def check_idle(self) -> None:
        """Raise ReshardError if the engine cannot take weights now."""
        self.engine.check_idle()

    def update_derived(self) -> None:
        """Write what the engine has lost and is not handed on: what it derives has come as it is."""
        self._twin.restore_left_alone()

    def drop_caches(self) -> None:
        """Forget what was computed from the weights before."""
        self.engine.drop_caches()

    def disconnect(self) -> None:
        """Give back what the engine took."""
        self.engine.disconnect()

    def adapter(self, name: str) -> AdapterEngine:
        """Return the adapter that the engine serves by a name above these weights; see `AdaptedEngine.adapter`."""
        if not isinstance(self.engine, AdaptedEngine):
            raise ReshardError(f"this {self.guard.engine} serves no LoRA adapters that a refit can bring")
        return self.engine.adapter(name)

    # For logs

    def quantized_layers(self) -> list[dict[str, Any]]:
        """Return what is not served in the trainer's dtype; see `Engine.quantized_layers`."""
        return self.engine.quantized_layers()

    def tensor_accounts(self) -> list[dict[str, Any]]:
        """Return what a refit does to the engine's tensors; see `Engine.tensor_accounts`."""
        return self.engine.tensor_accounts()


def handed_on_by(engine: Engine) -> ServedWeights:
    """Return what an engine's rank hands on: its weights as they were published, if it holds them so, else as it serves
    them. Raises ReshardError if it can do neither."""
    if engine.not_as_published() and isinstance(engine, TwinEngine):
        return Twin(engine)
    return engine.held_still()


def taking(engine: Engine, facts: Mapping[str, bytes]) -> Engine:
    """Have an engine take what those say that hold the weights, by their names; return what is to be written: the
    engine, or itself as a twin of another."""
    if isinstance(engine, Twin):  # planned anew
        engine = engine.engine
    offered = {who: one for who, payload in facts.items() for one in arrangements_in(payload, who)}
    if not offered:
        engine.take_facts(facts)
        return engine
    if len(offered) != len(facts):
        raise ReshardError(
            f"{listed(offered, 1)} serves weights in a form of its own, and {listed(facts.keys() - offered.keys(), 1)} "
            "does not: refit from one of them"
        )
    engine.take_facts({who: one.published for who, one in offered.items() if one.published})
    if engine.optional:
        has: Set[str] = {name for one in offered.values() for name in one.optional}
        engine.take_optional(engine.optional & has)
    twin = Twin(engine)
    twin.check_arranged_as(offered)
    return twin


def arrangements_in(payload: bytes, who: str) -> Iterator[Arrangement]:
    """Yield the arrangement in the facts of a member, if that is what they say."""
    if not payload.startswith(TWINS):
        return
    what = f"what {who} says of its weights"
    told = unpack_json(payload.removeprefix(TWINS), what)
    with readable(what):
        facts = {str(name): str(value) for name, value in told["facts"].items()}
        tensors = {
            str(name): [str(dtype), [*map(int, shape)], [*map(int, strides)]]
            for name, (dtype, shape, strides) in told["tensors"].items()
        }
        views = {
            str(name): [str(dtype), [*map(int, shape)], [*map(int, strides)], int(at), str(owner)]
            for name, (dtype, shape, strides, at, owner) in told["views"].items()
        }
        optional, published = [*map(str, told["optional"])], b64decode(told["published"], validate=True)
        arrangement = Arrangement(str(told["rank"]), facts, tensors, optional, views, published)
    yield arrangement
