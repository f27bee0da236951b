"""Packages that an installation lacks, named in one sentence with the line that installs it: an
extra, or what every installation brings but one with ``--no-deps``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from reshard.core.errors import ReshardError

# What all commands and calls are made of, by its name in Python, as pyproject.toml has it.
BASE = {
    "click": "click>=8.1", "huggingface_hub": "huggingface-hub>=0.25", "ml_dtypes": "ml_dtypes>=0.4",
    "numpy": "numpy>=1.26", "xxhash": "xxhash>=3.0",
}  # fmt: skip
# Which extra brings a package, for those who ask for the package alone.
EXTRA_OF = {
    "megatron.core": "megatron",
    "torch": "megatron",
    "transformers": "parity",
    "sglang": "sglang",
    "vllm": "vllm",
}


def require(extra: str, *packages: str) -> None:
    """Raise ReshardError, naming `extra`, where one of the packages (``torch``, ``megatron.core``) is not
    installed."""
    for package in packages:
        if not is_installed(package):
            raise _lacking(package, extra)


def require_base() -> None:
    """Raise ReshardError, with the line that installs them, where packages are not installed that
    weights on disk need."""
    if not all(map(is_installed, ("ml_dtypes", "numpy", "xxhash"))):
        raise _lacking_base()


@contextmanager
def importing(extra: str | None = None) -> Iterator[None]:
    """Around imports of packages that `extra`, or every installation, brings: raises ReshardError,
    with the line that installs it, where one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = lacking(error, extra)
        if missing is None:
            raise
        raise missing from error


@contextmanager
def importing_beside(trainer: str, *packages: str) -> Iterator[None]:
    """Around what an adapter imports of `trainer` (``ms-swift``), which is `packages` in Python: raises
    ReshardError, saying what is not there, where one of them, or a module of it, is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise ReshardError(
            f"this adapter is for an environment with {trainer}, and {error.name} is not installed here: "
            f"install reshard where {trainer} is"
        ) from error


def lacking(error: ModuleNotFoundError, extra: str | None = None) -> ReshardError | None:
    """The sentence for an import that failed because a package is not installed. None if it is, and the
    error says something else, or where no extra is known to bring it."""
    package = "megatron.core" if error.name == "megatron" else ".".join((error.name or "").split(".")[:2])
    if not package.startswith("megatron."):
        package = package.partition(".")[0]
    if package in BASE and not is_installed(package):
        return _lacking_base()
    extra = extra or EXTRA_OF.get(package)
    if extra is None or package in ("", "reshard") or is_installed(package):
        return None
    return _lacking(package, extra)


def is_installed(package: str) -> bool:
    """Return True if a package (``torch``, ``megatron.core``) could be imported. Imports at most what it lies in."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that it would be in is not there
        return False


def _lacking_base() -> ReshardError:
    missing = [name for name in BASE if not is_installed(name)]
    requirements = " ".join(f"'{BASE[name]}'" for name in missing)
    are = "is" if len(missing) == 1 else "are"
    return ReshardError(
        f"this needs {' and '.join(missing)}, which {are} not installed here: pip install {requirements}"
    )


def _lacking(package: str, extra: str) -> ReshardError:
    name = {"megatron.core": "megatron-core"}.get(package, package)
    return ReshardError(f"this needs {name}, which is not installed here: pip install 'reshard[{extra}]'")
