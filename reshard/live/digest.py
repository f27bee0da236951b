"""The digest of a live model's weights, of what each rank holds where it lies."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.core.errors import ReshardError
from reshard.core.gc import gc_paused
from reshard.device.digests import sums_of
from reshard.digests.numbers import seed_of
from reshard.digests.parts import numbers_of
from reshard.digests.result import Digest, counted_dtype
from reshard.live.collective import check_same_options, keyword_style_errors, open_team, run_on_first
from reshard.live.inventory import take_inventory
from reshard.live.local_boxes import LocalBoxes
from reshard.live.local_part import local_boxes
from reshard.live.published_model import PublishedModel
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.streams import TensorInfo
from reshard.trainers.fsdp import FsdpModel

if TYPE_CHECKING:
    from reshard.live.local_model import Models


def digest_of_models(
    models: "Models | FsdpModel",
    hf_config: "str | Path | PublishedModel | Any",
    *,
    dtype: object = None,
    make_vocab_size_divisible_by: int = 128,
    metadata: Mapping[str, Any] | None = None,
) -> Digest:
    """Return the digest of a live model, Megatron's or one under FSDP2, on every rank; all ranks of torch's default
    process group call it, while none trains.

    Every box that a rank holds is read, replicas too. Raises ReshardError on every rank if replicas differ, or the
    models are not that of `hf_config`, or lack a part of it.
    """
    with keyword_style_errors():
        target = float_dtype(dtype)
    with keyword_style_errors(), gc_paused(), open_team("a digest") as team:
        described: list[tuple[PublishedModel, LocalBoxes]] = []

        def describe() -> None:
            if hf_config is None:
                raise ReshardError(
                    "a live model has no published names of its own: give hf_config=, as to reshard.save"
                )
            published = PublishedModel.read(hf_config)
            local = local_boxes(models, metadata, turned_too=True)
            local.find_boxes(published.model, make_vocab_size_divisible_by)
            described.append((published, local))

        team.together(describe)
        [(published, local)] = described
        options = {
            "the digest of the config": published.digest,
            "dtype": None if target is None else target.name,
        }
        check_same_options(team, "digests", options)
        inventory = take_inventory(team, local, published)
        counted = {
            name: TensorInfo(info.shape, counted_dtype(name, info.dtype, target, inventory.fp32))
            for name, info in inventory.tensors.items()
            if name not in inventory.copies
        }
        seeds = {name: seed_of(name, info) for name, info in counted.items()}

        def sums() -> list[list[Any]]:
            local.trainer.sync_params()
            local.find_regions()
            boxes = [box._replace(dtype=counted[box.name].dtype.held_like(box.dtype)) for box in local.boxes]
            values = sums_of(boxes, [seeds[box.name] for box in boxes])
            return [
                [box.name, list(Rows.of(box.box)), value] for box, value in zip(boxes, values, strict=True)
            ]

        own: list[list[list[Any]]] = []
        team.together(lambda: own.append(sums()))
        parts = team.gather(own[0])
        hint = "load or save it anew, and look for what wrote to one rank only"
        numbers = run_on_first(team, lambda: numbers_of(counted, parts, "the trainer", hint))
        name = None if target is None else target.name
        return Digest.of("the trainer's model", counted, numbers, name, list(published.model.notices))
