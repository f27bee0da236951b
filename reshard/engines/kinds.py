"""Which engine somebody means."""

from typing import Any

from reshard.comm.http import call_route
from reshard.core.errors import ReshardError


def is_sglang(engine: Any) -> bool:
    """Return True for an ``sglang.Engine``, or a server that describes itself as SGLang's do."""
    if not isinstance(engine, str):
        return hasattr(engine, "server_args")
    try:
        info = call_route(engine, "server_info")
    except ReshardError:
        return False  # whose refusal says how to start it
    return isinstance(info, dict) and "tp_size" in info and "vllm_config" not in info
