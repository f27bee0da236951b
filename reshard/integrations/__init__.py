"""The weight sync of other people's trainers through a refit: vLLM's weight transfer, verl, TRL,
ms-swift, ROLL, NeMo-RL and slime."""

from typing import TYPE_CHECKING

from reshard.core.extras import require
from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.integrations.fleet import Fleet, FleetReport
    from reshard.integrations.sglang import SglangClient
    from reshard.integrations.vllm.transfer import HttpClient, LlmClient, WeightTransfer

require("megatron", "torch")

__all__ = ["Fleet", "FleetReport", "HttpClient", "LlmClient", "SglangClient", "WeightTransfer"]
if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        dict.fromkeys(__all__, "reshard.integrations.vllm.transfer")
        | dict.fromkeys(("Fleet", "FleetReport"), "reshard.integrations.fleet")
        | {"SglangClient": "reshard.integrations.sglang"},
    )
