"""What vLLM's own checksums have to be, if it serves a checkpoint.

vLLM 0.33 compares the sha256 of each rank's parameters with a ``baseline`` that its ``/weight_checker`` is given. Each
rank knows which boxes of which tensors its parameters are made of, so it can say that of any checkpoint: it reads the
boxes into host memory, a parameter at a time, and nothing of what it serves.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from reshard.comm.fronts import naming_the_extension
from reshard.core.errors import ReshardError, listed
from reshard.device.box_loader import BoxLoader
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.device.staging import ToDevice
from reshard.engines.digest import checked, plain_front
from reshard.refit.engine import Engine
from reshard.refit.reporting.served_parts import served_parts
from reshard.storage.sources.opening import open_source


def expected_checksums(llm: Any, path: str | Path) -> dict[str, str]:
    """Return the ``baseline`` for vLLM's ``/weight_checker`` with ``"action": "compare"``: the checksums of a running
    vLLM's parameters if it serves the checkpoint at `path`, which its hosts can read.

    `llm` is an ``LLM``, or the address of a ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, whose workers have
    `reshard.engines.vllm.worker.RefitExtension`. Raises ReshardError where a worker cannot say it.
    """
    front = plain_front(llm, "call expected_checksums of an LLM, or of a server")
    if front.engines > 1:
        raise ReshardError(f"of {front.engines} engines of this model one is heard: ask a server of each")
    with naming_the_extension(front):
        answers = checked(front.send(("reshard_expected_checksums", (str(path),))))
    return {name: value for answer in answers for name, value in answer.items()}


def checksums_of(engine: Engine, model: torch.nn.Module, path: str | Path) -> dict[str, str]:
    """Return the sha256 of each of this rank's parameters as they have to be, in hex.

    Raises ReshardError if the checkpoint is of another model, or a parameter is not made of its tensors alone.
    """
    if engine.scales or engine.staged_rounds:
        raise ReshardError(
            f"this {engine.guard.engine} serves quantized or rearranged weights, which a checkpoint does not have as "
            "they are served: ask reshard digest, or compare by a refit's verify=True"
        )
    engine.refresh_regions()
    parts = served_parts(engine)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    boxes = _by_parameter(parameters, parts.boxes)
    unknown = [name for name in parameters if name not in boxes]
    if unknown:
        raise ReshardError(f"no checkpoint has this {engine.guard.engine}'s {listed(unknown, 3)}")
    with closing(open_source(Path(path))) as source, source.unchanged():
        for name, info in parts.tensors.items():
            stored = source.tensors.get(name)
            if stored is None or stored.shape != info.shape:
                shape = "nothing" if stored is None else f"{list(stored.shape)}"
                raise ReshardError(
                    f"{path} is of another model: it has {shape} for {name} {list(info.shape)}"
                )
        loader = BoxLoader(source.reader, ToDevice(torch.device("cpu")), source.row_multiple)
        return {name: _sha256(parameters[name], boxes[name], loader) for name in parameters}


def _by_parameter(
    parameters: dict[str, torch.nn.Parameter], boxes: Iterable[LiveBox]
) -> dict[str, list[LiveBox]]:
    """Return the boxes that lie in each parameter. Others lie in buffers."""
    starts = sorted((parameter.data_ptr(), name) for name, parameter in parameters.items())
    by_parameter: dict[str, list[LiveBox]] = {}
    for box in boxes:
        place = bisect_right(starts, (box.region.address, "\U0010ffff")) - 1
        start, name = starts[max(place, 0)]
        parameter = parameters[name]
        if 0 <= box.region.address - start < parameter.untyped_storage().nbytes():
            by_parameter.setdefault(name, []).append(box)
    return by_parameter


def _sha256(parameter: torch.nn.Parameter, boxes: Iterable[LiveBox], loader: BoxLoader) -> str:
    """Return the sha256 of a parameter that is filled from files; what no box fills is padding, and zero."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype).zero_()
    in_host_memory = []
    for box in boxes:
        offset = (box.region.address - parameter.data_ptr()) // parameter.element_size()
        in_host_memory.append(box._replace(region=Region(made, offset, box.region.pitch)))
    for batch in loader.batches(in_host_memory):
        loader.load(batch)
    return hashlib.sha256(made.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
