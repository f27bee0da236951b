"""In the place of how NeMo-RL drives a checkpoint engine, one engine of vLLM to a rank."""

import ray
from nemo_rl.weight_sync.interfaces import WeightSynchronizer


class CheckpointEngineWeightSynchronizer(WeightSynchronizer):
    is_stale = True

    def __init__(self, policy, generation, config):
        self.policies, self.engines = policy.worker_group, generation.worker_group
        self.backend, self.kwargs, self.ready = (
            config["backend"],
            config["engine_kwargs"][config["backend"]],
            False,
        )

    def _policy(self, method, **kwargs):
        call = {"checkpoint_method": method, "method_kwargs": kwargs}
        return self.policies.run_all_workers_single_data("checkpoint_engine_rpc", **call)

    def _engines(self, method, args=()):
        call = {"checkpoint_method": method, "method_args": args}
        return self.engines.run_all_workers_single_data("checkpoint_engine_rpc", **call)

    def init_communicator(self):
        made = {"backend": self.backend, "bucket_size_bytes": 1, "engine_kwargs": self.kwargs}
        given = tuple(made.values())
        ray.get(
            self._policy("init_checkpoint_engine", **made) + self._engines("init_checkpoint_engine", given)
        )
        prepared = self._policy("prepare_checkpoint_engine"), self._engines("prepare_checkpoint_engine")
        trains, serves = ray.get(prepared[0]), [one for [one] in ray.get(prepared[1])]
        topology = {
            "train_world_size": len(trains),
            "rollout_world_size": len(serves),
            "metadata": trains + serves,
        }
        common = {"checkpoint_method": "init_checkpoint_engine_process_group"}
        each = [(rank, *topology.values()) for rank in range(len(serves))]
        asked = self.engines.run_all_workers_multiple_data(
            "checkpoint_engine_rpc", common_kwargs=common, method_args=each
        )
        ray.get(self._policy(common["checkpoint_method"], **topology) + asked)
        self.ready = True

    def sync_weights(self, *, timer=None, kv_scales=None):
        self.is_stale = True
        if not self.ready:
            self.init_communicator()
        sent = self._policy("send_weights_via_checkpoint_engine", kv_scales=kv_scales)
        ray.get(sent + self._engines("update_weights_from_checkpoint_engine"))
        self.is_stale = False

    def shutdown(self):
        ray.get(self._policy("finalize_checkpoint_engine") + self._engines("finalize_checkpoint_engine"))
        self.ready = False
