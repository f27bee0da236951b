"""Let engines choose ports that the system gives to nobody else.

An engine asks the system for a free port, gives it back, and listens there a moment later. By then the system may have
given it to another process: rare for one engine, not for the hundreds that the tests start beside each other.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from reshard.comm.hosts import free_address, parsed


def free_port(*_: Any, **__: Any) -> int:
    """Return a port of this host that is free now, and that the system gives to no connection."""
    return parsed(free_address("0.0.0.0"))[1]


if find_spec("sglang"):  # whose processes need no vLLM, which is beside it
    module, names = "sglang.srt.utils.network", ["get_open_port", "get_free_port"]
else:
    module, names = "vllm.utils.network_utils", ["_get_open_port"]
for name in names:
    assert hasattr(import_module(module), name), f"{module} has no {name} any more"
    setattr(import_module(module), name, free_port)
