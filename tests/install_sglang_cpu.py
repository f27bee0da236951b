"""Install SGLang into ``.sglang-cpu``, without its kernels: with that on PYTHONPATH before the ordinary
environment's packages, its model classes can be built and loaded without a GPU, and dense models served.

    python tests/install_sglang_cpu.py                   # the versions of tests/sglang-cpu.txt
    python tests/install_sglang_cpu.py sglang==0.5.23    # another version, into the folder that SGLANG_CPU names

The tests look into that folder too. What else it needs comes from the ordinary environment, such as torch.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("SGLANG_CPU", REPOSITORY / ".sglang-cpu"))

# Where torch brings NCCL, SGLang would use it on a CPU too.
WITHOUT_GPU = {"OMP_NUM_THREADS": "1", "SGLANG_NCCL_SO_PATH": "none"}


def installed() -> bool:
    """Return True if SGLang is installed there."""
    return any(TARGET.glob("sglang-*.dist-info"))


def version() -> tuple[int, ...]:
    """Return its version: (0, 5, 16)."""
    [metadata] = TARGET.glob("sglang-*.dist-info")
    return tuple(map(int, metadata.name.removeprefix("sglang-").removesuffix(".dist-info").split(".")))


def environment_of_engine() -> dict[str, str]:
    """Return the environment variables of a process that uses SGLang's classes."""
    assert installed(), "SGLang is not installed: run python tests/install_sglang_cpu.py"
    path = f"{TARGET}{os.pathsep}{REPOSITORY}"
    # Name by name, since pytest sets and deletes one while other threads ask for these.
    own = {name: os.environ.get(name, "") for name in list(os.environ)}
    return own | WITHOUT_GPU | {"PYTHONPATH": path}


def packages(others: list[str]) -> list[str]:
    """Return the packages of tests/sglang-cpu.txt, with `others` in the place of those of their names."""
    lines = Path(__file__).with_name("sglang-cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    return list({line.partition("==")[0]: line for line in (*pinned, *others)}.values())


def main() -> None:
    if installed():
        return
    if sys.argv[1:] and "SGLANG_CPU" not in os.environ:
        sys.exit("SGLANG_CPU is not set: name a folder for other versions than those of tests/sglang-cpu.txt")
    into = ["--python", sys.executable, "--target", TARGET, "--no-deps"]
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", *into, *packages(sys.argv[1:])]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
