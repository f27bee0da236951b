"""In the place of how NeMo-RL reads the config of a checkpoint engine."""


def checkpoint_engine_refit_config(generation_config):
    backend = generation_config["refit_transport"]
    return {"backend": backend, "engine_kwargs": {backend: dict(generation_config["refit_cfg"][backend])}}
