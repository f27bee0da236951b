"""SGLang's files of model classes, read without importing them."""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


@cache
def files_by_class(folder: Path) -> dict[str, str]:
    """Return the names of the files in a folder of SGLang's models, by the classes that each offers."""
    files = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8-sig")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                names = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                files |= {ast.unparse(name): path.stem for name in names}
    return files


def register(name: str) -> None:
    """Have SGLang's registry know a class that it offers, where it has passed over the file."""
    from sglang.srt.models.registry import ModelRegistry

    if name not in ModelRegistry.models:
        folder = Path(find_spec("sglang").origin).parent / "srt" / "models"  # type: ignore[union-attr,arg-type]
        module = import_module(f"sglang.srt.models.{files_by_class(folder)[name]}")
        ModelRegistry.models[name] = getattr(module, name)
