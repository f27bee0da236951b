"""In the place of what calls ROLL's workers."""

import ray


class ModelUpdateGroup:
    def __init__(self, src_cluster, tgt_cluster, pipeline_config, frequency=1):
        self.src_cluster, self.tgt_cluster = src_cluster, tgt_cluster
        self.model_update_name = "update"
        calls = {"infer_cluster": tgt_cluster, "model_update_name": self.model_update_name}
        ray.get([worker.setup_model_update.remote(**calls) for worker in src_cluster.workers])

    def model_update(self, step=None):
        update = {"model_update_name": self.model_update_name}
        return ray.get([worker.start_model_update.remote(**update) for worker in self.src_cluster.workers])
