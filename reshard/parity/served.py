"""Systems that an engine serves: a path, or the address of a running server, after the engine's name, as
in ``vllm:DIRECTORY``."""

from functools import cache
from typing import NamedTuple

from reshard.comm.http import call_route, is_address
from reshard.core.errors import ReshardError


class ServedBy(NamedTuple):
    """The module whose ``open_served`` opens an engine's systems; whether these may be quantized by an
    option."""

    module: str
    quantizes: bool


ENGINES = {
    "vllm": ServedBy("reshard.parity.systems.refitted", True),
    "sglang": ServedBy("reshard.parity.systems.sglang", False),
}


def engine_of(spec: str) -> str:
    """Return the engine that serves a system, empty if it is a path or a hub id alone.

    >>> engine_of("sglang:Qwen/Qwen3-8B"), engine_of("Qwen/Qwen3-8B"), engine_of("C:/models")
    ('sglang', '', '')
    """
    engine, colon, _ = spec.partition(":")
    return engine if colon and engine in ENGINES else ""


def place_of(spec: str) -> str:
    """Return the path, the hub id or the address of a system."""
    return spec.partition(":")[2] if engine_of(spec) else spec


def checkpoint_of(spec: str) -> str:
    """Return the path or hub id of a system's checkpoint, which a running server tells.

    Raises ReshardError if no such server answers.
    """
    place = place_of(spec)
    return _served_checkpoint(place) if is_address(place) else place


@cache
def _served_checkpoint(address: str) -> str:
    path = call_route(address.rstrip("/"), "model_info").get("model_path")
    if not isinstance(path, str):
        raise ReshardError(
            f"{address}/model_info does not tell which model it serves: give its directory instead"
        )
    return path
