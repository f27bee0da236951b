"""No module imports itself through others."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``reshard.``."""
    found = {}
    for base, prefix in (
        (ROOT / "reshard", ()),
        (ROOT / "cli", ("cli",)),
        (ROOT / "mappings", ("mappings",)),
    ):
        for path in base.rglob("*.py"):
            parts = (*prefix, *path.relative_to(base).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, path: Path) -> set[str]:
    """The modules of ours that a module imports: at its top, in functions, and for types only."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = f"reshard.{package}".rstrip(".").split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        ours = [t.removeprefix("reshard").lstrip(".") for t in targets if t.split(".")[0] == "reshard"]
        submodules = [target for target in ours[1:] if target in MODULES]
        imported |= set(submodules) or {target for target in ours[:1] if target in MODULES}
    return imported - {name}


IMPORTS = {name: imports_of(name, path) for name, path in MODULES.items()}


def cycles() -> list[list[str]]:
    """Groups of modules that import one another, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(IMPORTS[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(IMPORTS):
        if module not in index:
            visit(module)
    return groups


def test_no_module_imports_itself_through_others():
    """Neither at the top, nor in functions, nor for types only."""
    assert len(MODULES) > 150 and IMPORTS["megatron.arguments"] >= {"core.errors", "models.model"}
    assert cycles() == []


def test_a_cycle_is_seen(monkeypatch):
    monkeypatch.setitem(IMPORTS, "core.errors", {"megatron.arguments"})
    assert any("core.errors" in group for group in cycles())
