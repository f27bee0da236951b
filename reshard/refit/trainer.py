"""The source of a refit that trains: the interface of a trainer's rank."""

from reshard.refit.holder import Holder


class Trainer(Holder):
    """The weights of one rank of a trainer: a holder that may have to finish a step before it is read."""

    @property
    def has_pending_sync(self) -> bool:
        """True where training may have left something to `sync_params`; the same on all ranks."""
        return False

    def sync_params(self) -> None:
        """Finish what training has put off, before anything is read. All ranks of the trainer call
        it, and some may wait for others. Raises ReshardError if it fails."""
        return

    def is_readable_from_host(self) -> bool:
        """Return True if a refit could read all parameters if those that were moved to host memory stayed
        there; False if a trainer does not say."""
        return False
