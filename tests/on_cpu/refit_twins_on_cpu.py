"""vLLM's real model classes that serve quantized weights, and hand these on as they are, as `refit_on_cpu` runs
them."""

import os
from unittest.mock import patch

from reshard.engines.vllm.live import VllmModel
from tests.on_cpu.refit_on_cpu import engine_of
from tests.tools import twins


def brought_up(rank: int, sides: dict, flags: list[str], checkpoints: list, engine: dict, *rest) -> dict:
    """See `tests.tools.twins.brought_up`; `engine` are the options of all engines, but of others. An option
    `environment` has variables while an engine is made."""

    def make(directory: str, environment: dict[str, str] | None = None, **options) -> VllmModel:
        with patch.dict(os.environ, environment or {}):
            return VllmModel(*engine_of(directory, **engine | options))

    return twins.brought_up(rank, sides, flags, checkpoints, make, *rest, "vllm.")
