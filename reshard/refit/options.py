"""The options of a connection: `ConnectOptions`, which those of an engine's worker and of a trainer's framework
extend, so that each is named, typed and checked once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reshard.core.errors import OptionError
from reshard.core.limits import MOST_BUCKET_BYTES, check_number, check_switch
from reshard.refit.changes.choice import check_delta
from reshard.refit.protocol.encoding import is_word
from reshard.refit.routes import check_backend

BUCKET_BYTES = 512 << 20
Options = TypeVar("Options", bound="ConnectOptions")


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """The options of `reshard.refit.connect`, which says what each of them does.

    Members tell each other all but `delta_on_host`.
    """

    backend: str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    keep_mapped: bool = False
    adapter: str | None = None
    delta: bool | str = False
    delta_on_host: bool = False
    name: str | None = None  # of this member, in errors and logs of all

    def checked(self: Options, name: Callable[[str], str] = str) -> Options:
        """Return these options, with the present name of a backend. Raises ReshardError for a wrong value,
        with the option's full `name`, given its short one."""
        check_number(self.bucket_bytes, name("bucket_bytes"), MOST_BUCKET_BYTES)
        check_switch(self.keep_mapped, name("keep_mapped"))
        check_switch(self.delta_on_host, name("delta_on_host"))
        check_delta(self.delta, name("delta"))
        check_member_name(self.name, name("name"))
        if self.adapter is not None:
            check_adapter_name(self.adapter, name("adapter"))
        return replace(self, backend=check_backend(self.backend, name("backend")))


def check_member_name(value: Any, name: str) -> None:
    """Raise OptionError where what was given as `name` is no name of a member; None is that of none."""
    if value is not None and (not value or not is_word(value)):
        raise OptionError(
            f"{name} is {value!r:.80}, which is no name: give a printable text, such as a pod's name"
        )


def check_adapter_name(value: Any, name: str) -> None:
    """Raise OptionError where what was given as `name` cannot be an adapter's name."""
    if not value or not is_word(value) or "@" in value or value != value.strip():
        raise OptionError(
            f"{name} is {value!r:.80}, which is no name: give the one that requests ask vLLM for, without '@'"
        )
