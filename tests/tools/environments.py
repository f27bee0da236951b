"""Make virtual environments with uv, and run commands in them."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
UV = [sys.executable, "-m", "uv"]


def clean() -> dict[str, str]:
    """Return the environment variables, except those that name this process's Python packages or a
    run of several processes, Transformer Engine's, which Megatron sets when it makes a config, and the one
    that keeps bytecode from being written: in a new environment each process would compile torch and vLLM,
    which takes longer than most tests."""
    omitted = {
        "PYTHONDONTWRITEBYTECODE",
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
        name: value
        for name, value in os.environ.items()
        if name not in omitted and not name.startswith("NVTE_")
    }


def attempt(command: Sequence[str | Path], **options) -> subprocess.CompletedProcess:
    """Run a command to its end, whatever its status, outside of the checkout unless ``cwd`` is
    given."""
    settings = {"capture_output": True, "text": True, "env": clean(), "timeout": 1800, "cwd": "/"} | options
    return subprocess.run([str(part) for part in command], **settings)


def run(command: Sequence[str | Path], **options) -> str:
    """Run a command and return what it prints. Raises AssertionError, with the end of its output,
    if it fails."""
    done = attempt(command, **options)
    assert not done.returncode, (
        f"{' '.join(map(str, command))} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done.stdout


def clone(folder: Path) -> Path:
    """Clone the commit that is checked out here into `folder`, as a user would: no file that git
    does not know."""
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
    """Make a virtual environment with these packages in `folder` and return its Python. `python` is
    a version (default: this one)."""
    base_python = interpreter(python) if python else sys.executable
    run([*UV, "venv", "--quiet", "--python", base_python, folder])
    inside = folder / "bin" / "python"
    if packages:
        run([*UV, "pip", "install", "--quiet", "--python", inside, *options, *packages])
    return inside


def environment_before_ours(
    folder: Path, packages: Sequence[str], options: Sequence[str | Path] = ("--no-deps",)
) -> Path:
    """Make a virtual environment with these packages, by default without their dependencies, which
    finds the packages of this process after its own; return its Python."""
    inside = environment(folder, packages, options=options)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    (site_packages / "behind.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return inside


def interpreter(version: str) -> str:
    """Find a Python of this version (``3.11``). Raises LookupError if this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (version, *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))):
        search = attempt([*UV, "python", "find", "--offline", "--no-project", candidate])
        if not search.returncode:
            return search.stdout.strip()
    raise LookupError(f"no Python {version} here")


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
