"""Deltas: what changed between two versions of the same weights, and nothing else."""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.delta.chain import Chain, show
    from reshard.delta.disk import apply, save
    from reshard.delta.serving import apply_deltas, apply_deltas_async, roll_back, roll_back_async

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "Chain": "reshard.delta.chain",
            "apply": "reshard.delta.disk",
            "apply_deltas": "reshard.delta.serving",
            "apply_deltas_async": "reshard.delta.serving",
            "roll_back": "reshard.delta.serving",
            "roll_back_async": "reshard.delta.serving",
            "save": "reshard.delta.disk",
            "show": "reshard.delta.chain",
        },
        needs={"torch": ["apply", "save"]},
    )
__all__ = [
    "Chain",
    "apply",
    "apply_deltas",
    "apply_deltas_async",
    "roll_back",
    "roll_back_async",
    "save",
    "show",
]
