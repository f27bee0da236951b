"""The options of a weight sync, from a section of a trainer's config or from environment variables."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, ClassVar

from reshard.core.errors import ReshardError
from reshard.core.limits import check_seconds, check_switch
from reshard.refit.options import ConnectOptions

TIMEOUT = 600.0
SWITCHES = {"0": False, "1": True}  # values of environment variables
PREFIX = "RESHARD_"  # of their names
OTHER_VARIABLES = (
    "SECRET",
    "DEBUG",
    "IGNORE_CONFIG_FIELDS",
    "EXECUTOR",
    "MONITOR",
)  # those that are no options of a sync


@dataclass(frozen=True, kw_only=True)
class SyncOptions(ConnectOptions):
    """Options of a weight sync; a user may give those in `NAMES`.

    With `verify` digests of both sides are compared after each refit. `timeout` is how many seconds
    members wait for one another. With `begin`, for engines on other GPUs, what a step changed travels while both
    sides work, and the sync only switches (`reshard.integrations.begun`): by NCCL, with `delta`, both of which it
    brings along.
    """

    NAMES: ClassVar = ("verify", "timeout", "backend", "delta", "keep_mapped", "delta_on_host", "begin")

    verify: bool = False
    timeout: float = TIMEOUT
    begin: bool = False

    def checked(self, name: Callable[[str], str] = str) -> "SyncOptions":
        """Return these options; see `ConnectOptions.checked`."""
        check_switch(self.verify, name("verify"))
        check_seconds(self.timeout, name("timeout"))
        check_switch(self.begin, name("begin"))
        options = replace(super().checked(name), timeout=float(self.timeout))
        if not options.begin:
            return options
        if options.backend not in ("auto", "nccl"):
            raise ReshardError(
                f"{name('begin')} goes by nccl, not by {options.backend}: leave one of them out"
            )
        return replace(options, backend="nccl", delta=True)

    def check_not_begun(self, where: str, why: str) -> None:
        """Raise ReshardError with the option's name `where` it was given, if these say `begin`, which cannot be."""
        if self.begin:
            raise ReshardError(f"{where}: {why}; leave it out")

    def to_config(self) -> dict[str, Any]:
        """Return the options as `of_config` takes them."""
        return {name: getattr(self, name) for name in self.NAMES}

    @staticmethod
    def of_config(
        config: Mapping[str, Any], where: str, name: Callable[[str], str], others: Collection[str] = ()
    ) -> "SyncOptions":
        """Return the options in a section of a trainer's config. `where` names the section, `name` an option
        in it; `others` are the trainer's own options there.

        Raises ReshardError for an unknown option and for a wrong value.
        """
        known = (*SyncOptions.NAMES, *others)
        if unknown := sorted(config.keys() - set(known)):
            raise ReshardError(f"{where} has {unknown}: it takes {', '.join(known)}")
        options = {field: config[field] for field in SyncOptions.NAMES if field in config}
        return SyncOptions(**options).checked(name)

    @staticmethod
    def of_environment(where: str) -> "SyncOptions":
        """Return the options in the environment variables ``RESHARD_VERIFY``, ``RESHARD_TIMEOUT``,
        ``RESHARD_BACKEND``, ``RESHARD_DELTA``, ``RESHARD_DELTA_ON_HOST``, ``RESHARD_KEEP_MAPPED`` and
        ``RESHARD_BEGIN``; `where` says where a user sets them.

        Raises ReshardError for others than 0 or 1, seconds and backends, and for a variable that is spelled
        nearly as one of these.
        """
        _check_spelling(where)

        def switch(name: str) -> bool:
            value = os.environ.get(name, "0")
            if value not in SWITCHES:
                raise ReshardError(f"{name} is {value!r}: set it to 0 or 1 in {where}")
            return SWITCHES[value]

        timeout: Any = os.environ.get("RESHARD_TIMEOUT", str(TIMEOUT))
        with suppress(ValueError):  # what is no number is refused below
            timeout = float(timeout)
        return SyncOptions(
            verify=switch("RESHARD_VERIFY"),
            timeout=timeout,
            backend=os.environ.get("RESHARD_BACKEND", "auto"),
            delta=switch("RESHARD_DELTA"),
            keep_mapped=switch("RESHARD_KEEP_MAPPED"),
            delta_on_host=switch("RESHARD_DELTA_ON_HOST"),
            begin=switch("RESHARD_BEGIN"),
        ).checked(lambda name: f"RESHARD_{name.upper()} in {where}")


def _check_spelling(where: str) -> None:
    """Raise ReshardError for an environment variable that is nearly one of the options, and so would be passed
    over."""
    options = [field.upper() for field in SyncOptions.NAMES]
    known = {PREFIX + name for name in (*options, *OTHER_VARIABLES)}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for meant in get_close_matches(name.removeprefix(PREFIX), options, 1, 0.75):
                raise ReshardError(f"{name} in {where} is not an option: {PREFIX}{meant} is")
