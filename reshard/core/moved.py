"""Old names of modules, which work for one more release and warn with the new ones. Apart from `deprecated`, which
`import reshard` needs, since importing ``importlib.abc`` takes as long as all of that."""

import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class MovedModules(MetaPathFinder, Loader):
    """Lets modules be imported, and run by ``python -m``, under the names that they had: `moved`
    maps old names to new ones."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self.moved = moved

    def install(self) -> None:
        """Have Python ask this finder for modules that it does not find."""
        sys.meta_path.append(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that this loader loads, or None for a module that was not moved."""
        return ModuleSpec(fullname, self) if fullname in self.moved else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the placeholder that `exec_module` replaces."""
        warnings.warn(
            f"{spec.name} is now {self.moved[spec.name]}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Put the module itself under its old name, so that there is one of it."""
        sys.modules[module.__name__] = import_module(self.moved[module.__name__])

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the module's code, for ``python -m`` with the old name."""
        spec = util.find_spec(self.moved[fullname])
        return spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
