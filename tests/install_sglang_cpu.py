"""Install SGLang into ``.sglang-cpu``, without its kernels: with that on PYTHONPATH before the ordinary
environment's packages, its model classes can be built and loaded without a GPU, and dense models served.

    python tests/install_sglang_cpu.py       # the versions of tests/sglang-cpu.txt

What else it needs comes from the ordinary environment, such as torch.
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


def environment_of_engine() -> dict[str, str]:
    """Return the environment variables of a process that uses SGLang's classes."""
    assert installed(), "SGLang is not installed: run python tests/install_sglang_cpu.py"
    path = f"{TARGET}{os.pathsep}{REPOSITORY}"
    return os.environ | WITHOUT_GPU | {"PYTHONPATH": path}


def main() -> None:
    if installed():
        return
    into = ["--python", sys.executable, "--target", TARGET]
    packages = ["--no-deps", "--requirement", Path(__file__).with_name("sglang-cpu.txt")]
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "--quiet", *into, *packages], check=True)


if __name__ == "__main__":
    main()
