"""The examples that need no GPU, run as they are written."""

import subprocess
import sys
from pathlib import Path

from tests.checkpoints import make
from tests.install_vllm_cpu import environment_of_engine

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*command, env=None) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_convert(tmp_path):
    make(tmp_path / "qwen", "qwen3-moe")
    said = run(EXAMPLES / "convert.py", tmp_path / "qwen", tmp_path / "out", "--tp", 2, "--ep", 2)
    assert "there and back equal: True" in said


def test_refit_on_cpu():
    said = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, EXAMPLES / "refit_on_cpu.py", env=environment_of_engine()
    )
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in steps]
    assert len(losses) == 3 and losses[2] < losses[0] and "version 2, 185,088 bytes stayed" in steps[2]
    assert len({line.split("then ")[1] for line in steps}) == 3
