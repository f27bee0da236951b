"""States of a live PEFT model in which it is not its base plus B @ A of one adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.starting.ranks import caught


@contextmanager
def merged(model) -> Iterator[None]:
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()


@contextmanager
def second(model) -> Iterator[None]:
    """A second adapter, which is the active one."""
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    try:
        yield
    finally:
        model.delete_adapter("other")
        model.set_adapter("default")


VARIANTS = {"aLoRA": {"alora_invocation_tokens": [1, 2]}, "DoRA": {"use_dora": True}}
STATES = {"disabled": lambda model: model.disable_adapter(), "merged": merged, "second": second}
NAMED = {
    "disabled": "q_proj is disabled: a refit would make plain W + scale * B @ A of it",
    "merged": "q_proj is merged into the base's weights",
    "second": "q_proj is one of 2 (default, other), of which one at a time is refitted",
    "aLoRA": "q_proj is a ALoraLinear",
    "DoRA": "the trainer's adapter has DoRA (",
}


def refused(model, link, connect) -> dict[str, str]:
    """What a refit of the model's adapter says in each state, and `connect` of each variant that is more
    than B @ A."""
    said = {}
    for name, state in STATES.items():
        with state(model):
            said[name] = caught(link.refit)
    for name, settings in VARIANTS.items():
        said[name] = caught(partial(connect, variant(model.get_base_model(), settings)))
    return said


def variant(like, settings: dict):
    """A model of the same config with such an adapter of its queries."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **settings)
    return get_peft_model(type(like)(like.config), config)
