"""Where two models part: hidden states of transformers and of Megatron-Core, compared module by module."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError
from reshard.disk.compare import Difference, diff
from reshard.megatron.layout import Layout
from reshard.models.model import Model
from reshard.parity.huggingface import HuggingFace
from reshard.parity.megatron import Megatron
from reshard.parity.opening import open_system
from reshard.parity.prompts import Prompt, check_prompts
from reshard.parity.systems import device, hooked, join_processes, of_all_ranks

# Relative distance of two hidden states (norm of the difference over the norm) that two implementations do
# not have.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.03}
States = dict[str, torch.Tensor]


class Point(NamedTuple):
    """A module's output: its place for people, the module in transformers, and what its parameters' names
    begin with."""

    place: str
    module: str
    prefix: str


@dataclass(frozen=True)
class Located:
    """The first output that departs. `before` is the last one that agrees, `distance` relative to the norm,
    `parameters` feed it; `differing` are those whose bytes are not equal."""

    place: str
    before: str | None
    distance: float
    tolerance: float
    parameters: list[str]
    differing: list[Difference]

    @property
    def sentence(self) -> str:
        """For people."""
        after = f"; {self.before} still agrees" if self.before else ""
        count = len(self.parameters)
        if self.differing:
            more = f" and {len(self.differing) - 4} more" if len(self.differing) > 4 else ""
            names = ", ".join(d.name for d in self.differing[:4]) + more
            cause = (
                f"of its {count} parameters these differ: {names}"
                if count > 1
                else f"its parameter differs: {names}"
            )
        elif self.parameters:
            equal = f"its {count} parameters are" if count > 1 else "its parameter is"
            cause = f"{equal} equal bit for bit, so that the config or the code must differ"
        else:
            cause = "it has no parameters of its own"
        return f"{self.place} departs first (relative distance {self.distance:.2g}){after}; {cause}"

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"sentence": self.sentence}


def points_of(model: Model) -> list[Point]:
    """The outputs that are compared, in the order of the computation."""
    (embedding, at_first, _), (norm, before_last, _), (head, at_last, _) = model.family.ends
    points = [Point(embedding, at_first, at_first + ".")]
    for layer, kind in enumerate(model.kinds):
        path = f"{model.family.layers}{layer}"
        for place, module, _ in model.family.outputs:
            name = "experts" if place == "MLP" and kind == "moe" else place
            points.append(Point(f"the {name} of layer {layer}", f"{path}.{module}", f"{path}.{module}."))
        points.append(Point(f"the output of layer {layer}", path, path + "."))
    points.append(Point(norm, before_last, before_last + "."))
    return [*points, Point(head, at_last, (at_first if model.tied else at_last) + ".")]


def locate(
    a: str,
    b: str,
    prompt: Prompt,
    *,
    dtype: str = "fp32",
    layout: Layout | None = None,
    hf_config: str | Path | None = None,
    tolerance: float | None = None,
) -> Located | None:
    """Run one prompt through a Hugging Face directory and a Megatron checkpoint (in either order) and name
    the first output that departs.

    `tolerance` is the relative distance that two implementations have (default: by dtype). None where none
    departs. Under torchrun every rank calls it, and has the result. Raises ReshardError where the two are not
    one of each, or no output of theirs could be compared.
    """
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    if not 0 <= limit < float("inf"):
        raise ReshardError(f"a tolerance of {limit} cannot be: give a finite number of at least 0")
    join_processes()
    systems = [
        open_system(spec, dtype, layout or Layout(), Path(hf_config) if hf_config is not None else None)
        for spec in (a, b)
    ]
    hf = next((s for s in systems if isinstance(s, HuggingFace)), None)
    megatron = next((s for s in systems if isinstance(s, Megatron)), None)
    if hf is None or megatron is None:
        raise ReshardError(
            f"{a} and {b} must be a Hugging Face directory and a Megatron checkpoint: only "
            f"those can be compared inside"
        )
    check_prompts(
        [prompt], megatron.model.symbols["V"], int(megatron.model.config["max_position_embeddings"])
    )
    tokens = torch.tensor([prompt], device=device())
    points = points_of(megatron.model)
    theirs = of_all_ranks(_states_of_hf(hf, points, tokens) if dist.get_rank() == 0 else {})
    ours = of_all_ranks(_states_of_megatron(megatron, tokens))
    for system in systems:
        system.close()
    before = None
    for point in points:
        if point.module not in ours or point.module not in theirs:
            continue  # Transformer Engine has norms inside its linear layers
        x, y = theirs[point.module].double(), ours[point.module].double()
        distance = float((x - y).norm() / x.norm().clamp_min(1e-30))
        if not distance <= limit:
            found = diff(a, b, hf_config=hf_config, only=_beginning_with(point.prefix))
            return Located(point.place, before, distance, limit, found.names, found.differences)
        before = point.place
    if before is None:
        raise ReshardError(f"{a} and {b} have no module in common whose outputs could be compared")
    return None


def _beginning_with(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _states_of_hf(system: HuggingFace, points: Sequence[Point], tokens: torch.Tensor) -> States:
    states: States = {}
    modules = {point.module: system.module.get_submodule(point.module) for point in points}
    with hooked(modules, lambda name, _, __, out: states.__setitem__(name, _copied(out))), torch.no_grad():
        system.logits(tokens)
    return states


def _states_of_megatron(system: Megatron, tokens: torch.Tensor) -> States:
    """This rank's states, in transformers' names and order of dims."""
    from megatron.core.transformer.identity_op import IdentityOp

    family = system.model.family
    states: States = {}
    modules: dict[str, torch.nn.Module | None] = {}
    (_, embedding, its_embedding), (_, norm, its_norm), (_, head, _) = family.ends
    for chunk in system.models:
        model: Any = chunk
        if model.pre_process:
            modules[embedding] = model.get_submodule(its_embedding)
        for layer in model.decoder.layers:
            path = f"{family.layers}{layer.layer_number - 1}"
            modules[path] = layer
            modules |= {
                f"{path}.{module}": getattr(layer, its_module) for _, module, its_module in family.outputs
            }
        if model.decoder.final_layernorm is not None:
            modules[norm] = model.get_submodule(its_norm)
    compared = {
        name: module
        for name, module in modules.items()
        if module is not None and not isinstance(module, IdentityOp)
    }
    with (
        hooked(compared, lambda name, _, __, out: states.__setitem__(name, _copied(out).transpose(0, 1))),
        torch.no_grad(),
    ):
        logits = system.logits(tokens)
    if logits is not None:
        states[head] = logits.float().cpu()
    return states


def _copied(output: Any) -> torch.Tensor:
    """A copy of a module's output: without gradients Megatron adds the residual in place."""
    state = output[0] if isinstance(output, tuple) else output
    return state.detach().clone().float().cpu()
