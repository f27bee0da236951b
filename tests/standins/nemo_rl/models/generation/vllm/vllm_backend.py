"""In the place of NeMo-RL's extension of vLLM's workers."""

from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineMixin


class VllmInternalWorkerExtension:
    def _load_full_hf_weights(self, policy_weights):
        self.model_runner.model.load_weights(weights=policy_weights)


class VllmInternalWorkerExtensionWithCheckpointEngine(VllmCheckpointEngineMixin, VllmInternalWorkerExtension):
    pass
