"""Engines of versions that refits were not tested with, and their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NamedTuple

from reshard.core.errors import ReshardError


def version_of(package: str) -> str:
    """Return the version of an installed package, for people."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of no known version"


class TestedEngine(NamedTuple):
    """An engine that is used by private names: its name for people, its package, and the versions that refits
    were tested with (``0.24 to 0.33: use one of those``)."""

    name: str
    package: str
    versions: str

    def unknown(self, what: str) -> ReshardError:
        """Return the error for an engine that differs from the tested ones; `what` completes "this
        vLLM"."""
        return ReshardError(
            f"this {self.name} {self.installed} {what}; refits are tested with {self.name} {self.versions}"
        )

    @property
    def installed(self) -> str:
        """The version that is installed here."""
        return version_of(self.package)

    @contextmanager
    def known(self, what: str) -> Iterator[None]:
        """Turn the error for a name that the engine does not have into a ReshardError with its version;
        `what` completes "this vLLM"."""
        try:
            yield
        except (AttributeError, ImportError) as error:
            raise self.unknown(what) from error
