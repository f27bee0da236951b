"""In the place of what NeMo-RL's policy workers do with a checkpoint engine."""

from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine


class MegatronCheckpointEngineSendMixin:
    def _checkpoint_engine_weight_iterator(self, kv_scales=None):
        return self._iter_params_with_optional_kv_scales(kv_scales=kv_scales)


class PolicyCheckpointEngineMixin:
    async def send_weights_via_checkpoint_engine(self, kv_scales=None):
        await self.checkpoint_engine.send_weights(
            self._checkpoint_engine_weight_iterator(kv_scales=kv_scales)
        )

    async def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
        kwargs = method_kwargs or {}
        if checkpoint_method == "init_checkpoint_engine":
            if not hasattr(self, "checkpoint_engine"):
                self.checkpoint_engine = create_checkpoint_engine(kwargs.pop("backend"), **kwargs)
        elif checkpoint_method == "prepare_checkpoint_engine":
            return self.checkpoint_engine.prepare()
        elif checkpoint_method == "init_checkpoint_engine_process_group":
            self.checkpoint_engine.init_policy_process_group(worker_rank=self.rank, **kwargs)
        elif checkpoint_method == "send_weights_via_checkpoint_engine":
            await self.send_weights_via_checkpoint_engine(**kwargs)
        elif checkpoint_method == "finalize_checkpoint_engine":
            self.checkpoint_engine.finalize()
        else:
            return getattr(self.checkpoint_engine, checkpoint_method)(**kwargs)
