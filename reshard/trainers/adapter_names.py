"""Names of a live model's parameters, and what adapters put into them."""

from reshard.lora.checkpoint import ADAPTER, WRAPPED
from reshard.lora.names import PEFT_PREFIX


def is_of_adapter(name: str) -> bool:
    """Return True for the name of a matrix of an adapter."""
    return ADAPTER.search(name) is not None


def without_wrappers(key: str) -> str:
    """Return a key without what adapters put into the names of the weights that they wrap."""
    return WRAPPED.sub(".", key)


def without_peft(name: str) -> str:
    """Return a parameter's or module's name without what PEFT puts into that of a layer below an adapter."""
    return without_wrappers(name.removeprefix(PEFT_PREFIX))
