"""The extension of vLLM's workers under verl: verl's own and ours.

+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=reshard.integrations.verl.VerlExtension
"""

from reshard.core.extras import importing_beside

with importing_beside("verl", "verl"):
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from reshard.engines.vllm.worker import RefitExtension


class VerlExtension(vLLMColocateWorkerExtension, RefitExtension):
    """verl's extension, which looks at the worker's arguments, and ours, which makes the worker."""
