"""The converters that are compared: the packages of each one's environment, its commands, what it asks for."""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

ADAPTERS = Path(__file__).resolve().parent / "adapters"
TORCH = ("torch==2.11.0", "numpy==2.3.5")
# Transformer Engine 2.16.1's own wheels, less its torch extension, which is built from source or given with --wheels.
ENGINE = ("transformer_engine==2.16.1", "transformer_engine_cu13==2.16.1", "transformer_engine_torch==2.16.1",
          "nvidia-cublas==13.10.0.20")  # fmt: skip


class System(NamedTuple):
    """A converter: its name, its adapter, packages with and without their requirements, and whether it converts only
    back, from the checkpoint that reshard wrote."""

    name: str
    adapter: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    only_back: bool = False

    def command(self, python: str, *words: str) -> list[str]:
        """Return the command that runs the adapter."""
        return [python, str(ADAPTERS / f"{self.adapter}.py"), *words]

    def lines(self) -> int:
        """Return the lines of code that a user writes to convert and back, without docstrings and imports."""
        source = (ADAPTERS / f"{self.adapter}.py").read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        steps = [step for function in functions for step in function.body[1:]]
        kept = [step for step in steps if not isinstance(step, (ast.Import, ast.ImportFrom))]
        return sum((step.end_lineno or step.lineno) - step.lineno + 1 for step in kept)


SYSTEMS = (
    System(
        "Megatron-Bridge",
        "megatron_bridge",
        (*TORCH, "megatron-core==0.19.2", "transformers==5.12.1", "accelerate", "datasets", "einops", "omegaconf",
         "hydra-core", "peft", "wandb", "tensorboard", "absl-py", "nvidia-modelopt", "flash-linear-attention",
         "multi-storage-client", "onnxscript", "braceexpand", "webdataset", "rapidyaml", "s3fs", "pillow", "bitstring",
         "mfusepy", "qwen-vl-utils", "timm", "diffusers", "open-clip-torch", "filetype"),
        ("megatron-bridge==0.6.2", "megatron-energon", *ENGINE),
    ),
    System(
        "mcore-bridge",
        "mcore_bridge_",
        (*TORCH, "megatron-core==0.19.2", "mcore-bridge==1.6.5", "einops", "datasets", "pillow", "onnxscript"),
        ENGINE,
    ),
    System(
        "mbridge",
        "mbridge_",
        ("torch==2.11.0", "numpy<2", "megatron-core==0.14.0", "mbridge==0.15.1", "transformers==4.57.1", "einops",
         "accelerate", "onnxscript"),
        ENGINE,
    ),
    System(
        "slime",
        "slime_",
        (*TORCH, "megatron-core==0.19.2", "transformers<5.13", "einops", "safetensors", "omegaconf", "pyyaml",
         "accelerate", "ray", "httpx", "pillow", "wandb"),
        only_back=True,
    ),
)  # fmt: skip


def installs(system: System, environment: Path, wheels: Path | None) -> list[list[str]]:
    """Return the commands that make a system's environment with uv."""
    uv, python = [sys.executable, "-m", "uv"], ["--python", str(environment / "bin" / "python")]
    found = [] if wheels is None else ["--find-links", str(wheels)]
    return [
        [*uv, "venv", "--quiet", "--python", sys.executable, str(environment)],
        [*uv, "pip", "install", "--quiet", *python, *system.packages],
        *(
            [[*uv, "pip", "install", "--quiet", *python, *found, "--no-deps", *system.alone]]
            if system.alone
            else []
        ),
    ]
