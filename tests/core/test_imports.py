"""Packages import downward only, and there are no import cycles, neither in functions nor for type
checkers."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Lowest first, as in CONTRIBUTING.md. The longest name that fits a module is its layer; modules of
# one layer may import each other.
LAYERS = (
    ("core",), ("formats", "comm", "digests"), ("models",), ("mappings",), ("quantization",), ("megatron",), ("lora",),
    ("storage",), ("device", "delta"), ("refit",), ("trainers", "live", "engines"),
    ("html",), ("memory", "plan", "digest_of"), ("parity",), ("integrations",),
    ("testing", "demo"), ("cli", "__main__"),
)  # fmt: skip
# What only names what lies above them: `reshard` itself imports when a name is used.
EXEMPT = {"reshard"}


def modules() -> dict[str, Path]:
    """Return the package's files by module name, through the links to cli/ and mappings/ too."""
    files = {}
    for folder in (
        REPOSITORY / "reshard",
        REPOSITORY / "reshard" / "cli",
        REPOSITORY / "reshard" / "mappings",
    ):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports anywhere in it."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    # A package's own __init__ comes with each of its modules.
    return {other for other in imported & known.keys() if other != name and not name.startswith(f"{other}.")}


def layer_of(module: str) -> int:
    """Return the layer of a module: the one with the longest name that it begins with."""
    name = module.removeprefix("reshard.")
    fitting = [
        (len(entry), layer)
        for layer, entries in enumerate(LAYERS)
        for entry in entries
        if f"{name}.".startswith(f"{entry}.")
    ]
    assert fitting, f"{module} has no layer: add its package to LAYERS and to CONTRIBUTING.md"
    return max(fitting)[1]


@pytest.fixture(scope="module")
def graph():
    known = modules()
    assert len(known) > 150
    return {name: imports(name, path, known) for name, path in known.items()}


def test_packages_import_downward_only(graph):
    upward = [
        f"{name} imports {other}"
        for name, others in sorted(graph.items())
        if name not in EXEMPT
        for other in sorted(others - EXEMPT)
        if layer_of(other) > layer_of(name)
    ]
    assert upward == []


def modules_in_cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves through others."""
    reaches = {name: set(others) for name, others in graph.items()}
    changed = True
    while changed:
        changed = False
        for others in reaches.values():
            further = set().union(*(reaches.get(other, set()) for other in others)) - others
            others |= further
            changed = changed or bool(further)
    return sorted(name for name, others in reaches.items() if name in others)


def test_no_module_imports_itself_through_others(graph):
    assert modules_in_cycles(graph) == []


def test_a_cycle_would_be_seen():
    """The control."""
    assert modules_in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def proxies_in_dataclasses(tree: ast.Module) -> list[str]:
    """Return the fields of dataclasses whose default is a mapping proxy, which Python 3.11 takes for mutable."""

    def is_proxy(value: ast.expr | None) -> bool:
        return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("MappingProxyType")

    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and is_proxy(node.value)
    ]
    names = {
        ast.unparse(target) for node in assigned for target in getattr(node, "targets", None) or [node.target]
    }
    return [
        f"{node.name}.{ast.unparse(field.target)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and field.value
        if is_proxy(field.value) or ast.unparse(field.value) in names
    ]


def test_no_dataclass_has_a_default_that_python_3_11_refuses():
    found = [
        one for path in modules().values() for one in proxies_in_dataclasses(ast.parse(path.read_text()))
    ]
    control = (
        "_NONE: Mapping = MappingProxyType({})\n@dataclass(frozen=True)\nclass A:\n    a: Mapping = _NONE"
    )
    assert proxies_in_dataclasses(ast.parse(control)) == ["A.a"] and found == []


def test_the_page_on_engines_counts_their_lines_as_they_are():
    """Within a tenth, or twenty lines of a small file."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = " ".join(text.partition("## Add an engine")[2].partition("\n## ")[0].split())
    engines = REPOSITORY / "reshard" / "engines"

    def lines(files) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    shared = [file for file in engines.rglob("*.py") if not {"vllm", "sglang"} & {*file.parts}]
    counts = [
        (r"an example of ([\d,]+) lines", engines.glob("sglang/**/*.py")),
        (r"package has ([\d,]+) lines:", engines.glob("vllm/**/*.py")),
        (r"engines share has ([\d,]+)\.", shared),
    ]
    said = [(re.search(pattern, section)[1], lines(files)) for pattern, files in counts]  # type: ignore[index]
    for names, number in re.findall(r"\| ((?:`[\w/]+\.py`(?:, )?)+) \|[^|]*\| (\d+) \|", section):
        said.append((number, lines(engines / "sglang" / name for name in re.findall(r"[\w/]+\.py", names))))
    assert len(said) == 3 + 10
    for number, count in said:
        assert abs(int(number.replace(",", "")) - count) <= max(20, count / 10), (
            f"CONTRIBUTING.md says {number} lines of an engine; they are {count}"
        )
