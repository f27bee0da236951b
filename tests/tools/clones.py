"""Compare stand-ins for a project's classes with a clone of that project, and find variables for
its processes."""

import ast
from pathlib import Path

from tests.install_vllm_cpu import TARGET
from tests.tools.environments import REPOSITORY, clean

STANDINS = REPOSITORY / "tests" / "standins"
# What importing verl takes and this environment lacks; without what they ask for in turn, which is
# here or not needed. ROLL's and NeMo-RL's stand-ins take Ray alone.
RAY_PACKAGES = [
    "verl==0.9.1", "accelerate", "antlr4-python3-runtime==4.9.3", "codetiming", "datasets", "dill", "fsspec",
    "hydra-core", "msgpack", "multiprocess", "omegaconf", "orjson", "pandas", "peft", "pyarrow", "pylatexenc",
    "python-dateutil", "pyvers", "ray", "tensordict", "torchdata",
]  # fmt: skip


def methods(path: Path) -> dict[str, list[str]]:
    """Return the parameters of each method and function of a file, by name."""
    parameters = {}
    for kind in ast.parse(path.read_text()).body:
        inside = kind.body if isinstance(kind, ast.ClassDef) else [kind]
        for method in inside:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                a = method.args
                every = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
                name = f"{kind.name}.{method.name}" if kind is not method else method.name
                parameters[name] = [type(method).__name__, *(one.arg for one in every if one)]
    return parameters


def differing(name: str, clone: Path, own: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """Compare a project's stand-ins with its clone, except for methods that are the stand-ins'
    `own`. Return the methods that the clone lacks or calls with other parameters, and the number
    compared."""
    wrong, compared = [], 0
    for path in STANDINS.glob(f"{name}/**/*.py"):
        theirs = methods(clone / path.relative_to(STANDINS))
        for method, arguments in methods(path).items():
            if method not in own:
                compared += 1
                if theirs.get(method) != arguments:
                    wrong.append(f"{method}: {arguments}, {theirs.get(method)}")
    return wrong, compared


def variables(*where: Path) -> dict[str, str]:
    """Return environment variables of processes that use vLLM's build for the CPU and find projects
    at `where`."""
    return clean() | {
        "PYTHONPATH": ":".join(map(str, [TARGET, REPOSITORY, *where])),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
