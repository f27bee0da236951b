"""The backend ``reshard`` of vLLM's own weight transfer: a trainer that speaks that protocol refits shard to shard and
in place.

    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'
    LLM(MODEL, weight_transfer_config={"backend": "reshard"})

The trainer's side is `reshard.integrations.WeightTransfer`. What this file does is carried out by the worker's
`reshard.engines.vllm.worker.RefitExtension`, which the plugin gives an engine with this backend.
"""

from dataclasses import dataclass, field
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.engines.vllm.plugin import EXTENSION

with importing("vllm"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):
    """Where all members meet (``host:port``), the rank of this engine's first worker among them, how many they
    are, how long each waits for the others, in seconds, and the secret that they share (`RefitGroup.join`)."""

    address: str
    first_rank: int
    size: int
    timeout: float = 60.0
    secret: str | None = field(default=None, repr=False)


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):
    """The version that the weights then have, and whether digests of both sides are compared."""

    version: int | None = None
    verify: bool = False


class ReshardTransfer(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):
    """One worker's end. Weights are written where they are, so that nothing is to be prepared or finished: an update
    is one ``update_weights``, after which the engine is ready, or refuses to serve."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.worker: Any = None  # given by the extension once the model is loaded

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Meet the trainer's ranks, and connect; again where the engine was connected before."""
        self._extension().reshard_connect(
            init_info.address,
            init_info.first_rank,
            init_info.size,
            timeout=init_info.timeout,
            secret=init_info.secret,
        )

    def start_weight_update(self) -> None:
        """Nothing: what is checked before the first byte, all members check together."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One refit. Not vLLM's own, which waits for an accelerator, where there may be none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReshardUpdateInfo, *_: Any, **__: Any) -> None:
        """One refit. Raises ReshardError where it fails, and where vLLM has taken the weights aside."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ReshardError(
                "vLLM has taken its weights aside, to load others layer by layer: call "
                "start_weight_update(is_checkpoint_format=False)"
            )
        self._extension().reshard_refit(update_info.version, update_info.verify)

    def finish_weight_update(self) -> None:
        """Nothing: a refit that succeeded is whole."""

    def shutdown(self) -> None:
        """Let the trainer go: when vLLM is told to, and when it ends."""
        if self.worker is not None:
            self.worker.reshard_close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise ReshardError: the trainer's shards are read where they are, no tensors are handed over."""
        raise ReshardError(
            "the backend reshard takes no tensors: send with reshard.integrations.WeightTransfer"
        )

    def _extension(self) -> Any:
        if self.worker is None:
            raise ReshardError(f"the backend reshard needs worker_extension_cls={EXTENSION!r}, or a subclass")
        return self.worker
