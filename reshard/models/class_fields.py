"""Fields of an engine's own config class that transformers' class of the model does not have.

An engine may read a config by a class of its own, which gives fields a default that transformers' class knows nothing
of: vLLM's Afmoe has ``n_group = 1``. A trainer's config lacks such a field, and the engine would serve the trainer's
own checkpoint with the default. So the field makes no other model where the engine has that same value now. The engine
says which fields these are, in the config that it posts.
"""

from collections.abc import Mapping
from typing import Any

from reshard.models.config_fields import has_no_effect
from reshard.models.numerics_args import same_value

# In a config that an engine posts, and in each config within it: the fields that transformers' class does not have,
# each with whether it has the value that the engine's class gives it where a config lacks all of them, but for those of
# which that is not true.
OF_ENGINES_CLASS = "_of_engines_class"


def with_class_fields(published: dict[str, Any], config: Any, architecture: str) -> dict[str, Any]:
    """Return the dict of an engine's `config`, as it is `published`, with what `OF_ENGINES_CLASS` says; as it is where
    the class is one of transformers."""
    import transformers

    kind: Any = getattr(getattr(transformers, architecture, None), "config_class", None)
    if kind is None:
        return published
    return _marked(published, config, kind().to_dict())


def _marked(published: dict[str, Any], config: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its marks, and those within it with theirs; `plain` is what transformers' class has by
    default."""
    marked = dict(published)
    for name, value in published.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(inner, "to_dict"):
            marked[name] = _marked(value, inner, plain.get(name) or {})
    if not type(config).__module__.startswith("transformers."):
        marked[OF_ENGINES_CLASS] = _at_default(published, config, plain)
    return marked


def _at_default(published: dict[str, Any], config: Any, plain: Mapping[str, Any]) -> dict[str, bool]:
    names = [name for name in published if name not in plain and not has_no_effect(name)]
    # Without all of them at once, since a class may make one of another; then with those that are something else.
    kept, marks = set[str](), dict.fromkeys(names, True)
    for _ in range(2):
        rest = {key: value for key, value in config.to_dict().items() if key not in names or key in kept}
        try:
            made = type(config).from_dict(rest).to_dict()
        except Exception:  # a config class checks what it likes, and may need one of them
            made = {}
        for name in names:
            marks[name] &= name in made and same_value(made[name], published[name]) and name not in kept
        kept = {name for name in names if not marks[name]}
    return marks


def follows_from_class(name: str, lacking: Mapping[str, Any], having: Mapping[str, Any]) -> bool:
    """Return True for a field that one of two configs does not have, and that the other's class, an engine's, gives the
    value that it has there."""
    marks: Mapping[str, bool] = having.get(OF_ENGINES_CLASS) or {}
    return name not in lacking and marks.get(name, False)
