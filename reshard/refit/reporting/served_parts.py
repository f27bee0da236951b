"""What one rank of an engine says of the weights that it serves, for their digest."""

from dataclasses import dataclass
from typing import Any

from reshard.core.dtypes import Dtype, dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.device.digests import Sums
from reshard.device.live_boxes import LiveBox
from reshard.device.table_form import TableForm
from reshard.digests.numbers import seed_of
from reshard.digests.result import counted_dtype
from reshard.megatron.parameters import expand
from reshard.models.drafters import DRAFTER
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import any_model, tower_of
from reshard.refit.codecs.served_blocks import not_in, scales_of
from reshard.refit.drafter import DraftingEngine, digest_of_drafter
from reshard.refit.engine import TOWER_AS_LOADED, Engine
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.streams import TensorInfo


@dataclass(frozen=True)
class ServedParts:
    """The boxes of canonical tensors that one rank of an engine serves, each in the dtype in which it counts, and what
    these `tensors` are. A weight in blocks counts as its codes and its scales, as a checkpoint stores them.
    """

    tensors: dict[str, TensorInfo]
    boxes: list[LiveBox]

    def sums(self) -> Sums:
        """Return what takes what each box adds to the number of its tensor."""
        return Sums(self.boxes, [seed_of(box.name, self.tensors[box.name]) for box in self.boxes])


def digest_parts(engine: Engine, dtype: str | None = None) -> dict[str, Any]:
    """Return of each box that this rank serves its tensor's name, its rows and columns, and its sum; with the dtypes
    and shapes of the tensors, and the version. A drafter that is a model of its own has a digest apart (``drafter``),
    of what the rank holds of it. A tower that no refit has brought does not count; ``tower`` is of how many tensors it
    is.

    Raises ReshardError if the rank does not hold whole weights, or serves codes whose checkpoint is not known.
    """
    engine.guard.check_ready()
    engine.refresh_regions()
    parts = served_parts(engine, float_dtype(dtype))
    values = parts.sums().take()
    of_boxes = [
        [box.name, list(Rows.of(box.box)), value] for box, value in zip(parts.boxes, values, strict=True)
    ]
    described = {name: [info.dtype.name, list(info.shape)] for name, info in parts.tensors.items()}
    of_drafter = engine.drafter_tensors() if isinstance(engine, DraftingEngine) else {}
    return {
        "engine": engine.guard.engine,
        "version": engine.version,
        "tensors": described,
        "parts": of_boxes,
        "drafter": digest_of_drafter(of_drafter),
        "tower": sum(one["tensors"] for one in engine.tensor_accounts() if one["how"] == TOWER_AS_LOADED),
    }


def served_parts(engine: Engine, target: Dtype | None = None) -> ServedParts:
    """Return what a rank serves of its model, where its regions are now; with a `target` in that dtype.

    Raises ReshardError if it serves codes whose checkpoint is not known, or what is made of tensors that it has not
    kept.
    """
    transposes = engine.transposes()
    others = [identity for identity in engine.staged_rounds if identity not in transposes]
    if others:
        names = [str(each[0] if isinstance(each, tuple) else each) for each in others]
        raise ReshardError(
            f"this {engine.guard.engine} quantizes or rearranges {listed(names, 2)} into a form of its own, which no "
            "checkpoint has: its digest is not known; compare what it serves with a refit's verify=True"
        )
    engine.check_kept()
    model = any_model(engine.hf_config, f"{engine.guard.engine}'s config")
    mapping = expand(model)
    tower = tower_of(model, engine.hf_config) if engine.hf_config.get(TAKES_TOWER) else None
    shapes = mapping.shapes | (expand(tower).shapes if tower is not None else {})
    tensors: dict[str, TensorInfo] = {}
    boxes: list[LiveBox] = []

    def shape_of(name: str) -> tuple[int, ...]:
        if name not in shapes:
            raise ReshardError(f"this {engine.guard.engine} serves {name}, which its model does not have")
        return tuple(shapes[name])

    def add(live: LiveBox, shape: tuple[int, ...]) -> None:
        info = TensorInfo(shape, live.dtype)
        if tensors.setdefault(live.name, info) != info:
            raise ReshardError(
                f"this {engine.guard.engine} holds {live.name} as {tensors[live.name].dtype.name} and as "
                f"{live.dtype.name}: give dtype=, in which both count"
            )
        boxes.append(live)

    table = TableForm(model)
    for identity, tensor in engine.placement.tensors.items():
        region, scales, step = engine.regions[identity], engine.scales.get(identity), 1
        if (transpose := transposes.get(identity)) is not None:
            region, step = transpose._replace(pitch=1), transpose.pitch
        held = dtype_named(region.tensor.dtype)
        for part in tensor.parts:
            if part.name.startswith(DRAFTER):
                continue
            name = mapping.copies.get(part.name, part.name)
            live = LiveBox(name, part.box, region, Rows.of(part.local_box), held, step)
            if scales is None:
                for one in table.boxes(live):
                    counted = counted_dtype(one.name, held, target, mapping.fp32)
                    add(one._replace(dtype=counted), shape_of(one.name))
                continue
            if target is not None:
                raise ReshardError(not_in(target, name, engine.guard.engine))
            add(live, shape_of(name))
            of_scales, shape, box, in_memory, local, dtype = scales_of(
                name, shape_of(name), part, scales.region
            )
            add(LiveBox(of_scales, box, in_memory, local, dtype), shape)
    return ServedParts(tensors, boxes)
