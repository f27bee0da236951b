"""Find where two models diverge: compare hidden states of transformers and Megatron-Core module by
module.

In bf16 the rounding of a module depends on the model and grows with depth, so both systems are run
in fp32 as well: an output diverges where the two systems are further apart than their own rounding
explains.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.core.errors import ReshardError, listed
from reshard.megatron.configs import config_differences
from reshard.megatron.layout import MegatronLayout
from reshard.models.model import Model, has_experts
from reshard.parity.noise import COMPARABLE
from reshard.parity.prompts import Prompt, check_prompts
from reshard.parity.systems.base import SystemOptions, hooked
from reshard.parity.systems.huggingface import HuggingFace
from reshard.parity.systems.megatron import Megatron
from reshard.parity.systems.opening import check_one_of_each, is_megatron, model_of, open_system
from reshard.parity.systems.processes import device, gather_from_ranks, joined_processes, share_in_fp32
from reshard.storage.compare import Difference, diff
from reshard.storage.sources.hf_hub import config_path

# Relative distance of two hidden states (norm of the difference over the norm, a mean over tokens)
# that is no rounding in fp32, and the multiple of both systems' rounding by which they may be apart
# in another dtype.
TOLERANCE, ROUNDING_FACTOR = 1e-4, 2.0
States = dict[str, torch.Tensor]


class ModuleOutput(NamedTuple):
    """A module whose output is compared: its place for people, its name in transformers, and the
    prefix of its parameters' names."""

    place: str
    module: str
    prefix: str


@dataclass(frozen=True)
class Divergence:
    """The first module output that differs by more than rounding.

    `before` is the last output that agrees, `distance` is relative to the norm, `tolerance` the
    distance that rounding explains. `parameters` feed the module; `differing` are those whose bytes
    are not equal. `fields` are the config fields that make two models."""

    place: str
    before: str | None
    distance: float
    tolerance: float
    parameters: list[str]
    differing: list[Difference]
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The finding for people."""
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
            cause = f"{equal} equal bit for bit, {self._other_cause}"
        else:
            cause = "it has no parameters of its own"
        return f"{self.place} diverges first (relative distance {self.distance:.2g}){after}; {cause}"

    @property
    def _other_cause(self) -> str:
        if not self.fields:
            return "and the configs say the same, so that the code must differ"
        fields = listed(
            (f"{name} ({a!r:.60} in A, {b!r:.60} in B)" for name, (a, b) in self.fields.items()), 4
        )
        return f"and the configs differ in {fields}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for ``--json``."""
        return asdict(self) | {"sentence": self.sentence}


def describe_divergence(divergence: Divergence | None) -> str:
    """Return a sentence on the divergence, or on its absence."""
    if divergence is not None:
        return divergence.sentence
    return "no module's output diverges for the worst prompt: in each the two differ by no more than rounding"


def compared_outputs(model: Model) -> list[ModuleOutput]:
    """Return the outputs that are compared, in the order of the computation."""
    (embedding, at_first, _), (norm, before_last, _), (head, at_last, _) = model.family.ends
    in_memory = model.family.name_in_memory
    points = [ModuleOutput(embedding, in_memory(at_first), at_first + ".")]
    for layer, kind in enumerate(model.kinds):
        path = f"{model.family.layers}{layer}"
        for place, module, _ in model.family.outputs:
            name = "experts" if place == "MLP" and has_experts(kind) else place
            prefix = f"{path}.{model.family.published_module(module)}."
            points.append(ModuleOutput(f"the {name} of layer {layer}", in_memory(f"{path}.{module}"), prefix))
        points.append(ModuleOutput(f"the output of layer {layer}", in_memory(path), path + "."))
    points.append(ModuleOutput(norm, in_memory(before_last), before_last + "."))
    points.append(ModuleOutput(head, at_last, (at_first if model.tied else at_last) + "."))
    return [point._replace(prefix=model.published_name(point.prefix)) for point in points]


@joined_processes()
def find_divergence(
    a: str,
    b: str,
    prompt: Prompt,
    *,
    dtype: str = "fp32",
    layout: MegatronLayout | None = None,
    hf_config: str | Path | None = None,
    tolerance: float | None = None,
    positions: Sequence[int] | None = None,
) -> Divergence | None:
    """Run one prompt through a Hugging Face directory and a Megatron checkpoint (in either order)
    and return the first output that diverges, or None.

    `tolerance` is the relative distance that rounding may make. Default: 1e-4 in fp32; in bf16,
    module by module, twice the distance of both systems' outputs from their own in fp32, and a
    share of that between both in fp32. `positions` are those of the tokens (default: 0, 1, 2 ...).
    Under torchrun every rank calls this and gets the result.

    Raises ReshardError if the two are not one of each, or have no output in common.
    """
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ReshardError(f"a tolerance of {tolerance} cannot be: give a finite number of at least 0")
    config = config_path(hf_config) if hf_config is not None else None
    check_one_of_each(a, b)
    hf, mcore = (b, a) if is_megatron(a) else (a, b)
    models = [model_of(spec, config) for spec in (a, b)]
    context = int(models[0].config["max_position_embeddings"])
    check_prompts([prompt], models[0].symbols["V"], context)

    def outputs_in(kind: str) -> tuple[Model, States, States]:
        return _outputs(hf, mcore, prompt, positions, SystemOptions(kind, layout or MegatronLayout(), config))

    model, *outputs = outputs_in(dtype)
    exact = outputs_in("fp32")[1:] if tolerance is None and dtype != "fp32" else None
    before, compared = None, False
    for point in compared_outputs(model):
        if any(point.module not in states for states in outputs):
            continue  # Transformer Engine has norms inside its linear layers
        compared = True
        apart = _too_far_apart(point.module, outputs, exact, TOLERANCE if tolerance is None else tolerance)
        if apart is not None:
            result = diff(a, b, hf_config=hf_config, only=_beginning_with(point.prefix))
            fields = config_differences(*models)
            return Divergence(point.place, before, *apart, result.names, result.differences, fields)
        before = point.place
    if not compared:
        raise ReshardError(f"{a} and {b} have no module in common whose outputs could be compared")
    return None


def _outputs(
    hf: str,
    mcore: str,
    prompt: Prompt,
    positions: Sequence[int] | None,
    options: SystemOptions,
) -> tuple[Model, States, States]:
    """Return outputs of transformers' modules and of Megatron-Core's, on every rank. One system
    runs after the other."""
    tokens = torch.tensor([prompt], device=device())
    with closing(open_system(mcore, options)) as megatron:
        assert isinstance(megatron, Megatron)
        points = compared_outputs(megatron.model)
        ours = gather_from_ranks(_states_of_megatron(megatron, tokens, positions))
    with closing(open_system(hf, options)) as transformers:
        assert isinstance(transformers, HuggingFace)
        states = _states_of_hf(transformers, points, tokens, positions) if dist.get_rank() == 0 else {}
        return megatron.model, gather_from_ranks(states), ours


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean over tokens of the relative distance of their states. In a trained model a
    few tokens are a thousand times larger than the others; a norm over all tokens would see these
    alone."""
    x, y = one.double().flatten(0, -2), other.double().flatten(0, -2)
    return float(((x - y).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)).mean())


def _too_far_apart(
    module: str, outputs: Sequence[States], exact: Sequence[States] | None, tolerance: float
) -> tuple[float, float] | None:
    """Return the distance of a module's outputs in two systems and the limit that it exceeds, or
    None within it.

    With both systems' outputs in fp32 (`exact`) the limit is a multiple of their rounding, and of
    their distance in fp32 a share of it.
    """
    distance = _distance(*(states[module] for states in outputs))
    if exact is None:
        return None if distance <= tolerance else (distance, tolerance)
    errors = [_distance(x[module], y[module]) for x, y in zip(exact, outputs, strict=True)]
    # Rounding of one system far beyond the other's is a difference, not rounding.
    noise = math.hypot(*(min(error, COMPARABLE * min(errors)) for error in errors))
    in_fp32 = _distance(*(states[module] for states in exact))
    for apart, limit in ((distance, ROUNDING_FACTOR * noise), (in_fp32, share_in_fp32() * noise)):
        if not apart <= max(tolerance, limit):
            return apart, max(tolerance, limit)
    return None


def _beginning_with(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _states_of_hf(
    system: HuggingFace, points: Sequence[ModuleOutput], tokens: torch.Tensor, positions: Sequence[int] | None
) -> States:
    states: States = {}
    modules = {point.module: system.submodule(point.module) for point in points}
    with hooked(modules, lambda name, _, __, out: states.__setitem__(name, _copied(out))), torch.no_grad():
        system.logits(tokens, positions=positions)
    return states


def _states_of_megatron(system: Megatron, tokens: torch.Tensor, positions: Sequence[int] | None) -> States:
    """Return this rank's states under transformers' names, dims in transformers' order."""
    from megatron.core.transformer.identity_op import IdentityOp

    family = system.model.family
    states: States = {}
    modules: dict[str, torch.nn.Module | None] = {}
    (_, embedding, its_embedding), (_, norm, _), (_, head, _) = family.ends
    for chunk in system.models:
        model: Any = chunk
        if model.pre_process:
            modules[family.name_in_memory(embedding)] = model.get_submodule(its_embedding)
        for layer in model.decoder.layers:
            path = family.name_in_memory(f"{family.layers}{system.decoder_layer(layer)}")
            modules[path] = layer  # of a HybridModel's two halves the second
            for _, module, its_modules in family.outputs:
                outputs = (getattr(layer, name, None) for name in its_modules.split("|"))
                output = next(
                    (one for one in outputs if one is not None and not isinstance(one, IdentityOp)), None
                )
                if output is not None:
                    modules[f"{path}.{module}"] = output
        its_norm = "final_norm" if system.model_class == "hybrid" else "final_layernorm"
        modules[family.name_in_memory(norm)] = getattr(model.decoder, its_norm, None)
    compared = {name: module for name, module in modules.items() if module is not None}
    with (
        hooked(compared, lambda name, _, __, out: states.__setitem__(name, _with_bias(out).transpose(0, 1))),
        torch.no_grad(),
    ):
        logits = system.logits(tokens, positions=positions)
    if logits is not None:
        states[head] = logits.float().cpu()
    return states


def _with_bias(output: Any) -> torch.Tensor:
    """Copy the output of a module of Megatron's, with the bias that it leaves to what comes after it."""
    state, bias = _copied(output), output[1] if isinstance(output, tuple) and len(output) == 2 else None
    return state + _copied(bias) if isinstance(bias, torch.Tensor) and bias.ndim == 1 else state


def _copied(output: Any) -> torch.Tensor:
    """Copy a module's output: without gradients Megatron adds the residual in place."""
    state = output[0] if isinstance(output, tuple) else output
    return state.detach().clone().float().cpu()
