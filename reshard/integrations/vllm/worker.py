"""The backend ``reshard`` of vLLM's own weight transfer: a trainer that speaks that protocol refits
shard to shard and in place.

    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'
    LLM(MODEL, weight_transfer_config={"backend": "reshard"})

The trainer's side is `reshard.integrations.WeightTransfer`. The worker's
`reshard.engines.vllm.worker.RefitExtension`, which the plugin gives an engine with this backend,
carries the protocol out.
"""

from dataclasses import dataclass, field
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.engines.vllm.compat import end_update
from reshard.engines.vllm.plugin import EXTENSION
from reshard.engines.workers.actions import ACTIONS, BEGIN, DROP, REFIT, ROLL_BACK, SWITCH

with importing("vllm"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):
    """The meeting with the trainer: `address` (``host:port``), the member `first_rank` that this
    engine's first worker is, of `size` members; `timeout` is how many seconds each waits for the
    others, `secret` is that of `RefitGroup.join`, and `name` that of the engine, for errors and logs. With `adapter`
    the engine takes the adapter that it serves by this name, and the weights below it.

    With `lends`, a version, the engine hands on the weights of that version, which it serves, to another engine that
    comes there, once; it stays connected as it is."""

    address: str
    first_rank: int
    size: int
    timeout: float = 60.0
    secret: str | None = field(default=None, repr=False)
    name: str | None = None
    adapter: str | None = None
    lends: int | None = None


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):
    """The `version` of the weights, and whether to compare digests of both sides (`verify`). `ticket` is the
    trainer's `RefitGroup.ticket`: a call that comes late, or of an earlier connection, is refused by it.

    `action` is what is done: ``refit``; ``begin``, after which the changes come in the background; ``switch`` to them,
    or ``drop`` them; or ``roll back``, to the `version` that was served before a switch. These three have the ticket
    with which the changes were begun."""

    version: int | None = None
    verify: bool = False
    ticket: str | None = None
    action: str = REFIT


class ReshardTransfer(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):
    """One worker's end of the transfer.

    Weights are written in place, so nothing is to be prepared or finished: an update is one
    ``update_weights``, after which the engine is ready, or refuses to serve. One that was begun takes another, which
    switches.
    """

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.worker: Any = None
        self.begun: ReshardUpdateInfo | None = None  # that is to be switched to

    def attach_reshard_worker(self, worker: Any) -> None:
        """Use this worker, a `RefitExtension`, which calls this once its model is loaded."""
        self.worker = worker

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Meet the trainer's ranks and connect, also if the engine was connected before; or hand on what is served."""
        if init_info.lends is None:
            # Of a trainer that is gone, which can neither finish it nor let others begin.
            self.begun = None
            end_update(self.worker)
        meeting = init_info.address, init_info.first_rank, init_info.size
        options = {name: getattr(init_info, name) for name in ("timeout", "secret", "name", "adapter")}
        if init_info.lends is None:
            self._attached_worker().reshard_connect(*meeting, **options)
        else:
            self._attached_worker().reshard_lend(*meeting, init_info.lends, **options)

    def start_weight_update(self) -> None:
        """Do nothing: what has to be checked before the first byte, all members check together."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights. Not vLLM's own method, which waits for an accelerator, and there may be
        none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReshardUpdateInfo, *_: Any, **__: Any) -> None:
        """Take the weights. Raises ReshardError if the refit fails, and if vLLM has put its weights
        on the meta device."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ReshardError(
                "vLLM has moved its weights to the meta device, to load others layer by layer: call "
                "start_weight_update(is_checkpoint_format=False)"
            )
        worker, action, ticket = self._attached_worker(), update_info.action, update_info.ticket
        begun = self.begun
        if action == REFIT:
            with worker.reshard_expecting(ticket):
                self.begun = None
                worker.reshard_refit(update_info.version, update_info.verify)
        elif action == BEGIN:
            # Also where this worker fails: what all workers have to agree on, all are asked.
            self.begun = update_info
            worker.reshard_begin_refit(update_info.version, update_info.verify, ticket)
        elif action not in (SWITCH, DROP, ROLL_BACK):
            raise ReshardError(f"action is {action!r:.80}; it is one of {', '.join(ACTIONS)}")
        elif begun is not None and begun.ticket != ticket:  # which the call does not mean: it comes late
            if action != DROP:
                raise ReshardError(
                    f"the {action} comes late: what it means was given up, and another refit has begun since"
                )
        else:
            self.begun = None
            if action == SWITCH:
                if begun is None:
                    raise ReshardError("no version is pending: none was begun; refit this engine")
                worker.reshard_switch(update_info.version, ticket=ticket)
            elif action == ROLL_BACK:
                worker.reshard_roll_back(update_info.version, ticket=ticket)

    def finish_weight_update(self) -> None:
        """Do nothing: what an update does it has done. Raises ReshardError, whereupon vLLM takes no version, where what
        was begun is neither switched to nor dropped: what ends is another update, and the call comes late."""
        if self.begun is not None:
            raise ReshardError(
                "the end of an update comes late: another refit has begun since, and is neither switched to nor dropped"
            )

    def shutdown(self) -> None:
        """Disconnect from the trainer, on request and when vLLM ends."""
        if self.worker is not None:
            self.worker.reshard_close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise ReshardError: no tensors are handed over, since the trainer's shards are read where
        they are."""
        raise ReshardError(
            "the backend reshard takes no tensors: send with reshard.integrations.WeightTransfer"
        )

    def _attached_worker(self) -> Any:
        if self.worker is None:
            raise ReshardError(f"the backend reshard needs worker_extension_cls={EXTENSION!r}, or a subclass")
        return self.worker
