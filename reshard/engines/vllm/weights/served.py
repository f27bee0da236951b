"""A model and the model that drafts tokens for it, looked at as one, under the names that vLLM's
loader knows."""

from collections.abc import Iterator

import torch

from reshard.engines.placing.left_alone import DRAFT
from reshard.engines.vllm.adapters.wrappers import without_adapters


class Served:
    """The modules and tensors of a model and its drafter; what both share has its name in the
    model.

    `named_modules` has every module once. `adapters` are the modules that vLLM has wrapped around
    layers that adapters are added to, by the names of these layers.
    """

    def __init__(self, main: torch.nn.Module, draft: torch.nn.Module | None = None) -> None:
        self.main, self.draft = main, draft
        self.adapters: dict[str, torch.nn.Module] = {}
        self.named_modules: list[tuple[str, torch.nn.Module]] = []
        for prefix, model in (("", main), (DRAFT, draft)):
            if model is not None:
                self._add(prefix, model)

    def _add(self, prefix: str, model: torch.nn.Module) -> None:
        known = {module for _, module in self.named_modules}
        with without_adapters(model) as adapters:
            named = list(model.named_modules(prefix=prefix.rstrip(".")))
        self.named_modules += [(name, module) for name, module in named if module not in known]
        self.adapters |= {prefix + name: wrapper for name, wrapper in adapters.items()}

    def without(self, prefixes: tuple[str, ...]) -> "Served":
        """Return the same without the modules whose names begin with one of these."""
        others = Served(self.main, self.draft)
        others.named_modules = [named for named in self.named_modules if not named[0].startswith(prefixes)]
        return others

    def modules(self) -> list[torch.nn.Module]:
        """Return every module once."""
        return [module for _, module in self.named_modules]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, then every buffer, once, with its name."""
        seen: set[int] = set()
        for kind in ("_parameters", "_buffers"):
            for path, module in self.named_modules:
                for key, tensor in getattr(module, kind).items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{path}.{key}" if path else key, tensor
