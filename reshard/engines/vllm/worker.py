"""The engine's side of a refit if vLLM runs in processes of its own: mixed into its workers, called
through ``collective_rpc``.

    llm = LLM(..., worker_extension_cls="reshard.engines.vllm.worker.RefitExtension")
    llm.collective_rpc("reshard_connect", args=("127.0.0.1:29600", first_rank, size))
    llm.collective_rpc("reshard_refit", args=(version,))

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call
returns when both sides are done.
"""

import logging
from functools import partial
from typing import Any

from reshard.comm.group import MOST_MEMBERS
from reshard.comm.hosts import free_address
from reshard.core.errors import ReshardError
from reshard.core.limits import check_number
from reshard.engines.vllm.adapters.live import VllmAdapter
from reshard.engines.vllm.compat import agree, with_plain_weights
from reshard.engines.vllm.digest_methods import DigestOfEnginesMethods
from reshard.engines.vllm.guard import guard_of, state_of
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.requests.calls import Answer, answered
from reshard.engines.workers.delta_methods import DeltaMethods, answering
from reshard.engines.workers.lending import LendingMethods
from reshard.engines.workers.refits import (
    LinkMethods,
    WorkerOptions,
    connect_worker,
    log_refits,
    with_short_traceback,
)
from reshard.refit.guard import call_after

logger = logging.getLogger("vllm.reshard")  # below vLLM's own, which shows it
# Methods of a worker that make layers or load weights.
LOADING_METHODS = ("init_device", "load_model", "reload_weights")


class RefitExtension(DeltaMethods, DigestOfEnginesMethods, LinkMethods, LendingMethods):
    """Methods of a vLLM worker that connect it to a trainer and take its weights; for
    ``worker_extension_cls``."""

    def __new__(cls, *_: Any, **__: Any) -> "RefitExtension":
        """Make the worker, in the process that will load the model.

        From here on the worker's layers are made so that they can be refitted
        (`reshard.engines.vllm.compat.plain_weights`), and its weights are guarded from when they
        are loaded on.

        vLLM appends this class to the bases of its worker and refuses names that the worker has:
        the worker's ``load_model`` cannot be overridden, and its ``__init__`` calls none of ours.
        ``__new__`` is what runs first, and only where this extension is asked for.
        """
        worker = super().__new__(cls)
        for name in LOADING_METHODS:
            if hasattr(worker, name):
                setattr(worker, name, with_plain_weights(getattr(worker, name)))
        if hasattr(worker, "load_model"):
            worker.load_model = call_after(worker.load_model, lambda *_, **__: _watch(worker))
        return worker

    def reshard_connect(
        self, address: str, first_rank: int, size: int, *options: Any, **named_options: Any
    ) -> None:
        """Connect an engine to a trainer: for a call that all of its workers get, at the same time as
        the trainer's ranks connect.

        `address` is the ``host:port`` at which member 0 serves, the first of the trainer's ranks as
        a rule. `first_rank` is how many members come before the engine, which are the trainer's
        ranks, and the workers of engines before this one: this worker is that member plus its own
        rank within the engine. `size` is how many members there are in all. The options are those
        of `WorkerOptions.of_call`.

        Raises ReshardError, as on every other member, if the two sides do not hold the same model
        or a member is missing. Wrong arguments are refused before the present connection is given
        up.
        """
        check_number(first_rank, "first_rank", MOST_MEMBERS, 0)
        connecting = WorkerOptions.of_call(*options, **named_options).checked()
        rank = self._reshard_rank()
        self.reshard_connect_worker(address, first_rank + rank, size, **connecting.of_worker(rank))

    def _reshard_logger(self) -> logging.Logger | None:
        return logger if self.rank == 0 else None  # type: ignore[attr-defined]

    def _reshard_agree(self, is_done: bool) -> bool:
        return agree(is_done)

    def _reshard_rank(self) -> int:
        """Return the rank of this worker among those of all engines of its model."""
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        # By the index: the data parallel rank is 0 in each of the engines of a model without
        # experts.
        rank: int = self.rank + parallel.data_parallel_index * parallel.world_size  # type: ignore[attr-defined]
        return rank

    @answering
    def reshard_delta_workers(self) -> list[Any]:
        """Return how many workers this engine has, and, of the first worker, an address at which those of all engines
        of its model can meet."""
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        is_first = self._reshard_rank() == 0
        return [parallel.world_size, free_address(parallel.data_parallel_master_ip) if is_first else ""]

    @with_short_traceback
    def reshard_connect_worker(
        self, address: str, rank: int, size: int, *options: Any, **named_options: Any
    ) -> None:
        """Connect this worker as member `rank`: for trainers that call each worker by itself; else as
        `reshard_connect`."""
        connecting = WorkerOptions.of_call(*options, **named_options)
        self._reshard_check_other(address, connecting.secret)
        side = partial(self._reshard_side, connecting.match_vllm_rounding)
        self._reshard_link = connect_worker(address, rank, size, connecting, side, self.reshard_close)
        log_refits(logger, self._reshard_link, self.rank == 0)  # type: ignore[attr-defined]

    def _reshard_side(self, match_vllm_rounding: bool) -> VllmModel:
        """Return this worker's side: that of the last connect, if vLLM still has the same model in
        the same order."""
        last: VllmModel | None = getattr(self, "_reshard_engine", None)
        model = self.get_model()  # type: ignore[attr-defined]
        same_rounding = last is not None and last.match_vllm_rounding == match_vllm_rounding
        if last is None or not same_rounding or not last.still_serves(model):
            last = self._reshard_engine = VllmModel.from_worker(self, match_vllm_rounding=match_vllm_rounding)
        return last

    def _reshard_engine_side(self) -> VllmModel:
        """Return this worker's side, for a chain: that of the connection, where there is one."""
        last: VllmModel | None = getattr(self, "_reshard_engine", None)
        return self._reshard_side(last is not None and last.match_vllm_rounding)

    def reshard_answer(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Call another method of this worker, and return what it returns or raises: for engines that must hear all
        workers before they raise."""
        return answered(self, method, args, kwargs)

    def reshard_state(self, adapters_in_use: list[int] | None = None) -> dict[str, Any]:
        """Return what this worker holds: whether it is ``ready`` to serve, and which ``version``; if it is not, the
        ``refusal`` that requests get, and ``since`` when; whether vLLM is ``asleep``; and the ``adapters``
        that trainers refit.

        The engine's core, and nobody else, gives `adapters_in_use`: the ids of those of unfinished requests.
        """
        return state_of(self, None if adapters_in_use is None else lambda: adapters_in_use) or {}

    def reshard_adapter(self) -> dict[str, Any]:
        """Return the arguments of the ``LoRARequest`` for the newest version of the adapter, where this
        engine is connected with one.

        Raises ReshardError if none may be served.
        """
        receiver = self._reshard_connected().receiver
        if receiver is None or not isinstance(receiver.engine, VllmAdapter):
            raise ReshardError(
                "this engine is connected without an adapter: give reshard_connect adapter='NAME'"
            )
        request = receiver.engine.request()
        return {name: getattr(request, name) for name in ("lora_name", "lora_int_id", "lora_path")}


def _watch(worker: Any) -> None:
    """Guard this worker's weights from now on, and let vLLM's weight transfer use the worker, if
    that is ours."""
    model = worker.get_model()
    guard_of(model, worker.vllm_config, just_loaded=True).watch(model, worker)
    attach_worker = getattr(getattr(worker, "weight_transfer_engine", None), "attach_reshard_worker", None)
    if attach_worker is not None:
        attach_worker(worker)
