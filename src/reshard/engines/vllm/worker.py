"""The engine's side of a refit where vLLM runs in processes of its own: mixed into its workers, called
through ``collective_rpc``.

    llm = LLM(..., worker_extension_cls="reshard.engines.vllm.worker.RefitExtension")
    llm.collective_rpc("reshard_connect", args=("127.0.0.1:29600", trainer_ranks, trainer_ranks + engine_ranks))
    llm.collective_rpc("reshard_refit", args=(version,))

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call returns when
both sides are done.
"""

from contextlib import suppress
from functools import partial
from typing import Any

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import with_plain_weights
from reshard.engines.vllm.guard import guard_of, then
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.transfer import ReshardTransfer
from reshard.refit.connecting import BUCKET_BYTES, connect
from reshard.refit.link import Link
from reshard.refit.members import Members

# Methods of a worker that make layers or load weights.
MAKING = ("init_device", "load_model", "reload_weights")


class RefitExtension:
    """For ``worker_extension_cls``."""

    _reshard_link: Link | None = None

    def __new__(cls, *_: Any, **__: Any) -> "RefitExtension":
        """vLLM makes its worker, of which this is a base then, in the process that will load the model: from
        here on that worker's layers are made so that they can be refitted
        (`reshard.engines.vllm.compat.plain_weights`), and its weights are watched from when they are loaded
        on."""
        worker = super().__new__(cls)
        for name in MAKING:
            if hasattr(worker, name):
                setattr(worker, name, with_plain_weights(getattr(worker, name)))
        if hasattr(worker, "load_model"):
            worker.load_model = then(worker.load_model, lambda *_, **__: _watch(worker))
        return worker

    def reshard_connect(
        self,
        address: str,
        first_rank: int,
        size: int,
        executor: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,
        exact: bool = False,
        secret: str | None = None,
    ) -> None:
        """Join the members at ``host:port`` as rank `first_rank` plus this worker's rank, of `size` in all,
        and connect. `exact` is `VllmModel`'s, for layers in fp8; `secret` is that of `Members.join`."""
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        # By the index: the data parallel rank is 0 in each of the engines of a model without experts.
        mine = self.rank + parallel.data_parallel_index * parallel.world_size  # type: ignore[attr-defined]
        self.reshard_join(address, first_rank + mine, size, executor, bucket_bytes, timeout, exact, secret)

    def reshard_join(
        self,
        address: str,
        rank: int,
        size: int,
        executor: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,
        exact: bool = False,
        secret: str | None = None,
    ) -> None:
        """As `reshard_connect`, for who knows this worker's `rank` among all members."""
        self.reshard_close()
        members = Members.join(address, rank, size, timeout, secret)
        self._reshard_link = connect(
            members,
            destination=partial(self._reshard_side, exact),
            executor=executor,
            bucket_bytes=bucket_bytes,
        )

    def _reshard_side(self, exact: bool) -> VllmModel:
        """This worker's side: that of the last connect, where vLLM has the same model and order of weights
        still."""
        kept: VllmModel | None = getattr(self, "_reshard_engine", None)
        if kept is not None and kept.module is self.get_model() and kept.exact == exact:  # type: ignore[attr-defined]
            with suppress(ReshardError):
                kept.follow()
                return kept
        self._reshard_engine = VllmModel.from_worker(self, exact=exact)
        return self._reshard_engine

    def reshard_refit(self, version: int | None = None, verify: bool = False) -> dict[str, Any]:
        """Take the trainer's weights; the report as a dict."""
        return self._link().refit(version, verify).to_dict()

    def reshard_release(self) -> None:
        """Unmap the trainer's memory, together with the trainer's `Link.release`."""
        self._link().release()

    def reshard_close(self) -> None:
        """Give back what was mapped and staged, and forget the trainer; nothing where none is connected."""
        link, self._reshard_link = self._reshard_link, None
        if link is not None:
            link.close()

    def reshard_version(self) -> int | None:
        """The version of the weights that this worker serves; None before the first refit, and where vLLM has
        discarded or loaded them itself since."""
        engine = self._link().engine
        return engine.engine.version if engine is not None else None

    def _link(self) -> Link:
        if self._reshard_link is None:
            raise ReshardError("this engine is not connected: call reshard_connect first")
        return self._reshard_link


def _watch(worker: Any) -> None:
    """From here on, this worker serves whole weights only; and it carries out vLLM's weight transfer."""
    model = worker.get_model()
    guard_of(model, worker.vllm_config, just_loaded=True).watch(model, worker, None)
    transfer = getattr(worker, "weight_transfer_engine", None)
    if isinstance(transfer, ReshardTransfer):
        transfer.worker = worker
