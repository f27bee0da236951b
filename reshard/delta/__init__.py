"""Deltas: what changed between two versions of the same weights, and nothing else."""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.delta.chain import Chain, show
    from reshard.delta.disk import apply, save

__getattr__ = lazy(
    __name__,
    {
        "Chain": "reshard.delta.chain",
        "apply": "reshard.delta.disk",
        "save": "reshard.delta.disk",
        "show": "reshard.delta.chain",
    },
)
__all__ = ["Chain", "apply", "save", "show"]
