"""verl's weight sync as a refit: `plugin` is what verl imports, `VerlExtension` what vLLM's workers import, where the
trainer's packages may be missing. Nothing is imported before it is used."""

from reshard.core.lazy import lazy

PLACES = {"VerlExtension": f"{__name__}.worker"}
__all__ = [*PLACES]
__getattr__, __dir__ = lazy(__name__, PLACES)
