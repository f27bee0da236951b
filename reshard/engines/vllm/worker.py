"""The engine's side of a refit if vLLM runs in processes of its own: mixed into its workers, called
through ``collective_rpc``.

    llm = LLM(..., worker_extension_cls="reshard.engines.vllm.worker.RefitExtension")
    llm.collective_rpc("reshard_connect", args=("127.0.0.1:29600", trainer_ranks, trainer_ranks + engine_ranks))
    llm.collective_rpc("reshard_refit", args=(version,))

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call
returns when both sides are done.
"""

from contextlib import suppress
from functools import partial
from typing import Any

from reshard.comm.group import MOST_MEMBERS, RefitGroup, check_rank
from reshard.comm.hosts import parsed
from reshard.core.deprecated import accepts_renamed_options
from reshard.core.errors import ReshardError
from reshard.core.limits import MOST_BUCKET_BYTES, check_number, check_seconds, check_switch
from reshard.engines.guard import call_after
from reshard.engines.vllm.compat import with_plain_weights
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.live import VllmModel
from reshard.models.config_fields import ignore_hint_for
from reshard.refit.connecting import BUCKET_BYTES, connect
from reshard.refit.link import Link
from reshard.refit.routes import check_backend

# Methods of a worker that make layers or load weights.
LOADING_METHODS = ("init_device", "load_model", "reload_weights")


class RefitExtension:
    """Methods of a vLLM worker that connect it to a trainer and take its weights; for
    ``worker_extension_cls``."""

    _reshard_link: Link | None = None

    def __new__(cls, *_: Any, **__: Any) -> "RefitExtension":
        """Make the worker, in the process that will load the model.

        From here on the worker's layers are made so that they can be refitted
        (`reshard.engines.vllm.compat.plain_weights`), and its weights are guarded from when they
        are loaded on.
        """
        worker = super().__new__(cls)
        for name in LOADING_METHODS:
            if hasattr(worker, name):
                setattr(worker, name, with_plain_weights(getattr(worker, name)))
        if hasattr(worker, "load_model"):
            worker.load_model = call_after(worker.load_model, lambda *_, **__: _watch(worker))
        return worker

    @accepts_renamed_options
    def reshard_connect(
        self,
        address: str,
        first_rank: int,
        size: int,
        backend: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,
        match_vllm_rounding: bool = False,
        secret: str | None = None,
    ) -> None:
        """Join the trainer's ranks and the other workers, and connect; every worker and every rank
        does so at the same time.

        `address` is the ``host:port`` at which member 0 serves, the first of the trainer's ranks as
        a rule. This worker is member `first_rank` plus its own rank within the engine: `first_rank`
        is how many members come before the engine, which are the trainer's ranks, and the workers
        of engines before this one. `size` is how many members there are in all.

        `backend` and `bucket_bytes` are those of `reshard.refit.connect`. `timeout` is for how many
        seconds members wait for each other, in this call and in every refit. `match_vllm_rounding` is that of
        `VllmModel`. `secret` is that of `RefitGroup.join`, the same for all members.

        Raises ReshardError, as on every other member, if the two sides do not hold the same model
        or a member is missing.
        """
        check_number(first_rank, "first_rank", MOST_MEMBERS, 0)
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        # By the index: the data parallel rank is 0 in each of the engines of a model without
        # experts.
        rank = self.rank + parallel.data_parallel_index * parallel.world_size  # type: ignore[attr-defined]
        self.reshard_join(
            address, first_rank + rank, size, backend, bucket_bytes, timeout, match_vllm_rounding, secret
        )

    @accepts_renamed_options
    def reshard_join(
        self,
        address: str,
        rank: int,
        size: int,
        backend: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,
        match_vllm_rounding: bool = False,
        secret: str | None = None,
    ) -> None:
        """Connect as with `reshard_connect`, as member `rank`. Wrong arguments are refused before
        the present connection is given up."""
        parsed(address)
        check_rank(rank, size)
        check_backend(backend)
        check_number(bucket_bytes, "bucket_bytes", MOST_BUCKET_BYTES)
        check_seconds(timeout, "timeout")
        check_switch(match_vllm_rounding, "match_vllm_rounding")
        self.reshard_close()
        members = RefitGroup.join(address, rank, size, timeout, secret)
        with ignore_hint_for("refit"):
            self._reshard_link = connect(
                members,
                destination=partial(self._reshard_side, match_vllm_rounding),
                backend=backend,
                bucket_bytes=bucket_bytes,
            )

    def _reshard_side(self, match_vllm_rounding: bool) -> VllmModel:
        """Return this worker's side: that of the last connect, if vLLM still has the same model in
        the same order."""
        last: VllmModel | None = getattr(self, "_reshard_engine", None)
        same_model = last is not None and last.module is self.get_model()  # type: ignore[attr-defined]
        if last is not None and same_model and last.match_vllm_rounding == match_vllm_rounding:
            with suppress(ReshardError):
                last.refresh_regions()
                return last
        self._reshard_engine = VllmModel.from_worker(self, match_vllm_rounding=match_vllm_rounding)
        return self._reshard_engine

    def reshard_refit(self, version: int | None = None, verify: bool = False) -> dict[str, Any]:
        """Take the trainer's weights; return the report as a dict."""
        check_switch(verify, "verify")
        return self._link().refit(version, verify).to_dict()

    def reshard_release(self) -> None:
        """Unmap the trainer's memory, together with the trainer's `Link.release`."""
        self._link().release()

    def reshard_close(self) -> None:
        """Free what was mapped and staged, and forget the trainer, if one is connected."""
        link, self._reshard_link = self._reshard_link, None
        if link is not None:
            link.close()

    def reshard_version(self) -> int | None:
        """Return the version of the weights that this worker serves.

        None before the first refit, and if vLLM has discarded the weights or loaded others since.
        """
        receiver = self._link().receiver
        return receiver.engine.version if receiver is not None else None

    def _link(self) -> Link:
        if self._reshard_link is None:
            raise ReshardError("this engine is not connected: call reshard_connect first")
        return self._reshard_link


def _watch(worker: Any) -> None:
    """Guard this worker's weights from now on, and let vLLM's weight transfer use the worker, if
    that is ours."""
    model = worker.get_model()
    guard_of(model, worker.vllm_config, just_loaded=True).watch(model, worker, None)
    attach_worker = getattr(getattr(worker, "weight_transfer_engine", None), "attach_reshard_worker", None)
    if attach_worker is not None:
        attach_worker(worker)
