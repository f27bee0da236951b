"""The options of a connection: `ConnectOptions`, which those of an engine's worker and of a trainer's framework
extend, so that each is named, typed and checked once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reshard.core.errors import OptionError
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.refit.protocol.encoding import is_word
from reshard.refit.relays import AUTO, check_relays
from reshard.refit.routes import check_backend

BUCKET_BYTES = 512 << 20
Options = TypeVar("Options", bound="ConnectOptions")


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """The options of `reshard.refit.connect`. Members tell each other all but `delta_on_host` and `pending_bytes`.

    `backend` is ``auto`` (peers' memory within a host, staged where that cannot be mapped, NIXL
    between hosts that have it and RDMA, NCCL between others, and where engines have twice as many GPUs as the
    trainer, and so pass on what they get), ``cuda_ipc``, ``staged``, ``nixl`` or
    ``nccl``; one that says another than ``auto`` decides for all. `bucket_bytes` bounds the memory of
    all buckets of a rank together; the least that a member gives counts. When a refit returns, engines
    have unmapped the trainers' memory, so that a trainer may free it; mappings stay where all trainers'
    ranks give `keep_mapped`, for trainers that never do, and so do NCCL's buckets, which it then exchanges
    without copies through memory of its own.

    With `adapter` the trainer has adapters, and the engine serves them by this name: the first refit
    of the link brings the weights below them (`Link.below`), and each the adapter. All members give the same
    name.

    With `delta` trainers' ranks keep what they sent by NCCL, or Gloo, and send what changed since, where all
    members still have the weights of the refit before. It is kept on the trainer's device, or with
    `delta_on_host` in pinned host memory: as many bytes as each rank sends, once for replicas. One member that
    gives `delta` decides for all. What goes by other backends, the adapter, and what the engine quantizes itself
    always go whole.

    `pending_bytes` is the most memory that what a refit brings that is begun (`Link.begin_refit`) may take on a rank
    of either side, beside the weights; the least that a trainer's rank gives counts.

    With `relays` engines that want the same bytes of a trainer's rank by NCCL, or Gloo, pass them on to each other, or
    read them from each other by NIXL and staged, so that they leave it once: ``auto`` (where there are enough to gain
    by it), ``always`` or ``never``; one that says another than ``auto`` decides for all.

    `origin` tells the versions of one sender from those of all others that have the same numbers: a text drawn at
    random, which engines keep beside the version. All who have the weights give the same, or none.
    """

    backend: str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    keep_mapped: bool = False
    adapter: str | None = None
    delta: bool = False
    delta_on_host: bool = False
    pending_bytes: int = PENDING_BYTES
    relays: str = AUTO
    origin: str = ""
    name: str | None = None  # of this member, in errors and logs of all

    def checked(self: Options, name: Callable[[str], str] = str) -> Options:
        """Return these options, with the present name of a backend. Raises ReshardError for a wrong value,
        with the option's full `name`, given its short one."""
        check_number(self.bucket_bytes, name("bucket_bytes"), MOST_BUCKET_BYTES)
        check_number(self.pending_bytes, name("pending_bytes"), MOST_BUCKET_BYTES)
        check_switch(self.keep_mapped, name("keep_mapped"))
        check_switch(self.delta_on_host, name("delta_on_host"))
        check_switch(self.delta, name("delta"))
        check_member_name(self.name, name("name"))
        if self.adapter is not None:
            check_adapter_name(self.adapter, name("adapter"))
        relays = check_relays(self.relays, name("relays"))
        return replace(self, backend=check_backend(self.backend, name("backend")), relays=relays)

    def told(self) -> dict[str, Any]:
        """Return those that members tell each other, as `reshard.refit.protocol.greeting.Greeting` has them."""
        return {
            "backend": self.backend,
            "bucket_bytes": self.bucket_bytes,
            "keep_mapped": self.keep_mapped,
            "adapter": self.adapter or "",
            "delta": self.delta,
            "relays": self.relays,
            "origin": self.origin,
        }

    def for_adapter(self: Options) -> Options:
        """Return the options of the adapter's own connection, which always goes whole: its slots in the engine take
        turns, so that none has the version before."""
        return replace(self, delta=False)


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
