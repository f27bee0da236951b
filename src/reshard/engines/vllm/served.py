"""The model that an engine serves, and the one that drafts tokens for it where there is one, looked at as one."""

from collections.abc import Iterator

import torch

DRAFT = (
    "draft."  # what the names of a drafter's modules and tensors begin with, as in vLLM itself from 0.33 on
)


class Served:
    """A model and its drafter; what both have has its name in the model."""

    def __init__(self, main: torch.nn.Module, draft: torch.nn.Module | None = None) -> None:
        self.main, self.draft = main, draft

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield every module once, with its name."""
        yield from self.main.named_modules()
        if self.draft is not None:
            shared = set(self.main.modules())
            for name, module in self.draft.named_modules(prefix=DRAFT.rstrip(".")):
                if module not in shared:
                    yield name, module

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield every module once."""
        return (module for _, module in self.named_modules())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, then every buffer, once, with its name."""
        seen: set[int] = set()
        modules = list(self.named_modules())
        for kind in ("_parameters", "_buffers"):
            for path, module in modules:
                for key, tensor in getattr(module, kind).items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield f"{path}.{key}" if path else key, tensor
