"""The registry of admissions: what each request passes before an engine core takes it.

An admission is called with the request and the core's gate, in the thread that makes all calls to the
workers, so that what `Workers.states` says holds until the request is in vLLM's scheduler. It

- returns, if the request may pass;
- sets ``request.lora_request``, if another adapter shall serve it. The request keeps that one for life,
  also in the keys of its prefixes;
- raises ReshardError, whose sentence is the request's answer. The engine goes on.

Whether the weights are whole is no admission: that may change while a request waits, so that the gate
looks before each step.
"""

from collections.abc import Callable
from typing import Any

from reshard.engines.vllm.requests.adapters import Workers, choose_version

Admission = Callable[[Any, Workers], None]

# In the order in which a request passes them.
ADMISSIONS: list[Admission] = [choose_version]
