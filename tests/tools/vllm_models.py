"""vLLM's classes of our families, imported here and now.

For each architecture that it meets for the first time on a machine, vLLM starts a process that
imports the model's file and says what it can do, so that this process need not initialize CUDA.
Every rank of every test would start one, and there is no CUDA here.
"""

from reshard.models.family import families


def register(*others: str) -> None:
    """Tell vLLM's registry the classes themselves: those of our families, and `others`."""
    from vllm.model_executor.models import ModelRegistry

    ours = {name for family in families().values() for name in (family.architecture, family.wrapped_in[0])}
    for architecture in {*ours, *others} & ModelRegistry.models.keys():
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
