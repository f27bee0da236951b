"""Names that trainers and merge tools give to a model's tensors, and the published names that they stand for.

A program that saves a base model, a model inside a wrapper, or the language model of a larger one writes the
names of its modules, and transformers loads them all the same.
"""

from collections.abc import Collection

from reshard.core.views import tensor_of
from reshard.models.model import Model
from reshard.models.without_table import ClassFamily

# What wrappers put into a name, and before it: activation checkpointing, FSDP, torch.compile; DDP.
WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
WRAPPER_PREFIX = "module."
# What names begin with in files: of a base model, of a language model alone, of one in a larger model.
PREFIXES = (
    "model.", "", "model.language_model.", "language_model.model.", "language_model.", "model.language_model.model.",
)  # fmt: skip


def published_names(names: Collection[str], model: Model) -> dict[str, str]:
    """Return the published name of each of these tensors, by its name in a file; the same name for one that is
    published, or not known."""
    renamed, known = {name: _unwrapped(name) for name in names}, _as_transformers_saves(model)
    for rule in (_prefixed, _in_memory, _tied):
        changes = rule({*renamed.values()}, model)
        renamed = {
            name: published if published in known else changes.get(published, published)
            for name, published in renamed.items()
        }
    return renamed if len({*renamed.values()}) == len(renamed) else {name: name for name in names}


def _as_transformers_saves(model: Model) -> Collection[str]:
    """Return the names that tensors of a model without a mapping table have in its files; of others the rules know
    what they begin with."""
    return {*map(tensor_of, model.family.saved)} if isinstance(model.family, ClassFamily) else ()


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix(WRAPPER_PREFIX)


def _prefixed(names: Collection[str], model: Model) -> dict[str, str]:
    """Return the published names of tensors of the language model that begin with another prefix, of the output
    layer, and of what is in a larger model beside them."""
    embedding, _, head = (model.published_name(module) for _, module, _ in model.family.ends)
    ends = [model.published_name(module).rpartition(".")[2] for _, module, _ in model.family.ends[:2]]
    prefix, _, last = f"{embedding}.weight".rpartition(f"{ends[0]}.")
    changes = {}
    if f"{embedding}.weight" not in names:
        used = next((each for each in PREFIXES if f"{each}{ends[0]}.{last}" in names), prefix)
        inside = tuple(f"{used}{module}." for module in (*ends, "layers"))
        changes = {name: prefix + name.removeprefix(used) for name in names if name.startswith(inside)}
    if not any(name.startswith(f"{prefix}layers.") for name in (*names, *changes.values())):
        blocks = f"{prefix}blocks."  # as transformers saves Kimi-K2.5, whose tower has them
        changes |= {
            name: f"{prefix}layers.{name.removeprefix(blocks)}" for name in names if name.startswith(blocks)
        }
    if f"{head}.weight" not in names:
        for each in PREFIXES:
            if f"{each}lm_head.weight" in names:
                changes[f"{each}lm_head.weight"] = f"{head}.weight"
                break
    if not any(name.startswith(model.towers) for name in names):
        short = {tower.removeprefix("model."): tower for tower in model.towers}
        changes |= {
            name: tower + name.removeprefix(start)
            for name in names
            for start, tower in short.items()
            if name.startswith(start)
        }
    return changes


def _in_memory(names: Collection[str], model: Model) -> dict[str, str]:
    """Return the published names of tensors that have the names of a transformers model in memory."""
    in_memory = model.names_in_memory()
    return {name: in_memory[name] for name in names if name in in_memory and in_memory[name] not in names}


def _tied(names: Collection[str], model: Model) -> dict[str, str]:
    """Return the embedding's name for an output layer that is saved in its place."""
    embedding, _, head = (f"{model.published_name(module)}.weight" for _, module, _ in model.family.ends)
    alone = model.tied and embedding not in names and head in names
    return {head: embedding} if alone else {}
