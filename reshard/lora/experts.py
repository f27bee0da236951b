"""The parameters in which transformers 5 has all experts of a layer, of which PEFT has one adapter
(``target_parameters``)."""

from typing import NamedTuple

from reshard.lora.parameters import LinearLayer
from reshard.models.model import Model


class ExpertsParameter(NamedTuple):
    """A parameter of all experts: its `module` in a transformers model and that of the published names, its name, and
    whether a row of gate and one of up lie in turn in it."""

    module: str
    published_module: str
    name: str
    interleaved: bool

    @property
    def modules(self) -> tuple[str, ...]:
        """The names that files may have for the module, that of a transformers model first."""
        return tuple(dict.fromkeys((self.module, self.published_module)))

    @property
    def is_first(self) -> bool:
        """True for the parameter that PEFT wraps first where it wraps both, so that it lies below ``base_layer``."""
        return self.name != "down_proj"


def experts_parameter(layer: LinearLayer, model: Model) -> ExpertsParameter:
    """Return the parameter in which a transformers model has the weights of a layer of experts."""
    in_memory = {published: name for name, published in model.names_in_memory().items()}
    published = layer.published()
    module, _, part = in_memory.get(published[0], published[0]).rpartition(".experts.")
    name = "gate_up_proj" if len(published) > 1 else part.removesuffix(".weight").rpartition(".")[2]
    interleaved = any("0:1 in 2" in stored and name in stored for _, stored in model.family.packed)
    return ExpertsParameter(
        f"{module}.experts", f"{published[0].rpartition('.experts.')[0]}.experts", name, interleaved
    )
