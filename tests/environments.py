"""Virtual environments of their own, made with uv, and what the tests run in them."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UV = [sys.executable, "-m", "uv"]


def clean() -> dict[str, str]:
    """The environment variables without those that name this process's Python packages or a run of several processes, and without
    Transformer Engine's, which Megatron sets where it makes a config."""
    ours = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    return {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith("NVTE_")
    }


def attempt(command: Sequence[str | Path], **options) -> subprocess.CompletedProcess:
    """Run a command to its end, good or bad, away from the checkout unless ``cwd`` says otherwise."""
    settings = {"capture_output": True, "text": True, "env": clean(), "timeout": 1800, "cwd": "/"} | options
    return subprocess.run([str(part) for part in command], **settings)


def run(command: Sequence[str | Path], **options) -> str:
    """What a command prints; AssertionError, with the end of what it said, where it fails."""
    done = attempt(command, **options)
    assert not done.returncode, (
        f"{' '.join(map(str, command))} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done.stdout


def clone(folder: Path) -> Path:
    """Clone the commit that is checked out here into `folder`, as a user would: no file that git does not know."""
    run(["git", "clone", "--quiet", "--no-checkout", REPOSITORY, folder])
    head = run(["git", "-C", REPOSITORY, "rev-parse", "HEAD"]).strip()
    run(["git", "-C", folder, "checkout", "--quiet", "--detach", head])
    return folder


def build(checkout: Path, folder: Path) -> tuple[Path, Path]:
    """Build an sdist of a checkout, and a wheel from that sdist; return (wheel, sdist)."""
    run([*UV, "build", "--quiet", "--out-dir", folder, checkout])
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def environment(
    folder: Path,
    packages: Sequence[str | Path],
    python: str | None = None,
    options: Sequence[str | Path] = (),
) -> Path:
    """A new virtual environment with these packages, in `folder`; its Python. `python` is a version, default: this one."""
    chosen = interpreter(python) if python else sys.executable
    run([*UV, "venv", "--quiet", "--python", chosen, folder])
    inside = folder / "bin" / "python"
    run([*UV, "pip", "install", "--quiet", "--python", inside, *options, *packages])
    return inside


def environment_before_ours(folder: Path, packages: Sequence[str]) -> Path:
    """A new virtual environment with these packages and nothing that they ask for, which finds the packages of this
    process behind its own; its Python."""
    inside = environment(folder, packages, options=["--no-deps"])
    there = next(folder.glob("lib/python*/site-packages"))
    (there / "behind.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return inside


def interpreter(version: str) -> str:
    """A Python of this version (``3.11``). Raises LookupError where this machine has none."""
    for there in (
        version,
        *sorted(
            Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
                f"versions/{version}.*/bin/python"
            )
        ),
    ):
        found = attempt([*UV, "python", "find", "--offline", "--no-project", there])
        if not found.returncode:
            return found.stdout.strip()
    raise LookupError(f"no Python {version} here")


def size_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
