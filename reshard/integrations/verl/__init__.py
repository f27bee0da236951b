"""verl's weight sync as a refit. `plugin` is what verl imports, `VerlExtension` the extension of vLLM's workers,
where what the trainer needs may not be installed: nothing is imported before it is used."""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.integrations.verl.worker import VerlExtension

__all__ = ["VerlExtension"]
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, {"VerlExtension": f"{__name__}.worker"})
