"""vLLM as the destination of a refit, and vLLM that starts from a Megatron checkpoint."""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension

__all__ = ["RefitExtension", "VllmModel"]
__getattr__ = lazy(
    __name__,
    {"RefitExtension": "reshard.engines.vllm.worker", "VllmModel": "reshard.engines.vllm.live"},
    extra="vllm",
)
