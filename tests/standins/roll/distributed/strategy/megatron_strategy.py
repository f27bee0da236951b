"""In the place of ROLL's strategy for Megatron."""


class MegatronWeightUpdater:
    pass


class MegatronTrainStrategy:
    def setup_model_update(self, infer_cluster, model_update_name):
        self.weight_updaters[model_update_name] = MegatronWeightUpdater()

    def model_update(self, model_update_name):
        return self.weight_updaters[model_update_name].model_update()
