"""NeMo-RL with Megatron and vLLM: its weight sync as a refit. `docs/trainers/nemo-rl.md` has the lines of config.

On GPUs of their own, `ReshardCheckpointEngine` is what ``policy.generation.refit_transport`` names. On the same GPUs

    python -m reshard.integrations.nemo_rl examples/run_grpo.py --config ...

runs NeMo-RL's script with `ColocatedSynchronizer` in the place of its synchronizer of weights. vLLM's workers are
`reshard.integrations.nemo_rl_worker.ReshardWorker` in either. What a refit does not cover is refused before a byte moves.
"""

import functools
import runpy
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import nullcontext
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.deprecated import accepts_renamed_options, renamed_options
from reshard.core.errors import ReshardError, listed
from reshard.core.limits import check_seconds, check_switch
from reshard.integrations.calls import WORD_SECONDS, Calls
from reshard.integrations.meeting import meeting_place
from reshard.refit.connecting import connect
from reshard.refit.link import Link
from reshard.refit.routes import check_backend
from reshard.trainers.megatron import MegatronModel

BACKEND = "reshard.integrations.nemo_rl:ReshardCheckpointEngine"
WORKER = "reshard.integrations.nemo_rl_worker.ReshardWorker"
TIMEOUT = 600.0
WAITS = 3  # time limits, one after the other, that a sync may take in all
# Of vLLM's data parallel groups, who talks to its engine.
ONE_OF_EACH_ENGINE = ["tensor_parallel", "pipeline_parallel"]


class ReshardCheckpointEngine(CheckpointEngine):
    """How a policy and rollouts elsewhere meet, and refit; no tensor passes through it. Made in every rank of the policy
    and in every worker of vLLM.

    `verify` compares digests of both sides after each sync, `timeout` is how long members wait for one another, in
    seconds, `backend` is that of `reshard.refit.connect`.
    All meet at the first sync, and anew after one that failed, or with `release_after_refit`.
    """

    @accepts_renamed_options
    def __init__(
        self,
        bucket_size: int = 0,
        verify: bool = False,
        timeout: float = TIMEOUT,
        backend: str = "auto",
        release_after_refit: bool = False,
        **others: Any,
    ) -> None:
        self.verify, self.timeout, self.backend = checked(verify, timeout, backend, others)
        self.rank, self.size, self.secret = 0, 0, ""
        # Where all are seated, for as long as they live: NeMo-RL tells no member of another's death.
        self.board: RefitGroup | None = None
        self.given: str | None = None
        self.link: Link | None = None
        self.source: MegatronModel | None = None
        self.new, self.syncs = True, 0

    def prepare(self) -> dict[str, Any]:
        """Where all could be seated, of which only the policy's first is taken. vLLM's own processes know no Ray."""
        return (
            {"address": meeting_place(), "secret": new_secret()} if ray.is_initialized() else {"address": ""}
        )

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take a seat where the first rank of the policy serves; it says there at each connect where to meet for it."""
        self._seat(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """See `init_policy_process_group`. Raises ReshardError in a worker of vLLM that is not ours."""
        from reshard.integrations.nemo_rl_worker import here

        here()
        self._seat(train_world_size + rollout_rank, train_world_size, rollout_world_size, metadata)

    def _seat(self, rank: int, policies: int, rollouts: int, metadata: list[Any]) -> None:
        self.rank, self.size, self.secret = rank, policies + rollouts, metadata[0]["secret"]
        self.board = None  # the one before ends first
        self.board = RefitGroup.join(metadata[0]["address"], rank, self.size, self.timeout, self.secret)
        self.board.names = {
            one: f"rank {one} of the policy" if one < policies else f"rank {one - policies} of the rollout"
            for one in range(self.size)
        }
        self.board.begin("syncs")
        self.board.post("seated")
        self.given, self.new, self.syncs = None, True, 0

    def meeting_place(self) -> str:
        """See the function."""
        return meeting_place()

    def meet(self, address: str, size: int, secret: str) -> None:
        """Said by `ColocatedSynchronizer`: connect there at the next sync."""
        self.given, self.size, self.secret, self.new = address, size, secret, True

    async def send_weights(self, weights: Any) -> None:
        """On every rank of the policy: connect where that is new, and refit."""
        self.syncs += 1
        try:
            if self.new or self.link is None:
                worker = worker_of(weights)
                self.rank = worker.rank
                address = self.given or self._said_where()
                members = RefitGroup.join(address, self.rank, self.size, self.timeout, self.secret)
                with members.watching(self._ended):
                    self.link = connect(members, lambda: self._source(worker), backend=self.backend)
            with self.link.members.watching(self._ended):
                self.link.refit(verify=self.verify)
        except BaseException:
            self.link, self.new = None, True
            raise
        self.new = False

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """In every worker of vLLM: the same. No batch is left for NeMo-RL to load."""
        from reshard.integrations.nemo_rl_worker import here

        self.syncs += 1
        try:
            if self.new:
                here().reshard_join(
                    self._said_where(), self.rank, self.size, timeout=self.timeout, secret=self.secret
                )
            here().reshard_refit(verify=self.verify)
        except BaseException:
            self.new = True
            raise
        self.new = False
        if False:
            yield []

    def finalize(self) -> None:
        """Unmap the others' memory; the next sync connects again."""
        if self.link is not None:
            self.link.close()
        self.link, self.new = None, True

    def _ended(self) -> str:
        """Say who is gone; empty while nobody is."""
        return self.board.failure() if self.board is not None else ""

    def _said_where(self) -> str:
        """Where to meet at this sync. The first rank says it where all are seated, by the number of the sync, which NeMo-RL starts
        on all of them."""
        if self.board is None:
            raise ReshardError("this member has no seat: NeMo-RL has not called init_*_process_group")
        if self.rank == 0:
            self.board.post(f"meet/{self.syncs}", meeting_place().encode())
        return self.board.read(f"meet/{self.syncs}", 0).decode()

    def _source(self, worker: Any) -> MegatronModel:
        why = refused(worker.cfg)
        if why:
            raise ReshardError(f"{why}, which reshard does not refit: leave NeMo-RL its own weight sync")
        if self.source is None:
            self.source = MegatronModel(worker.model)
        return self.source


def worker_of(weights: Any) -> Any:
    """Whose weights a generator yields that has not begun: NeMo-RL's is a method of its Megatron worker, and nothing
    else leads from there to the model. Raises ReshardError for others."""
    frame = getattr(weights, "gi_frame", None)
    worker = frame.f_locals.get("self") if frame is not None else None
    if not all(hasattr(worker, name) for name in ("model", "cfg", "rank")):
        raise ReshardError(
            "these are not the weights of NeMo-RL's Megatron worker: set policy.megatron_cfg.enabled=true, or leave "
            "policy.generation.refit_transport unset"
        )
    return worker


class ColocatedSynchronizer(WeightSynchronizer):
    """In the place of NeMo-RL's synchronizer for GPUs that policy and vLLM share: its order, with a refit in the middle."""

    def __init__(
        self,
        policy: Any,
        generation: Any,
        verify: bool = False,
        timeout: float = TIMEOUT,
        backend: str = "auto",
    ) -> None:
        self._policy, self._generation = policy, generation
        self._verify, self._timeout, self._backend = verify, timeout, backend
        self._stale, self._new = True, True
        self._address, self._secret = "", ""  # where all have met last, and with which secret

    @property
    def is_stale(self) -> bool:
        """Whether vLLM has other weights than the last ones that were asked for."""
        return self._stale

    def init_communicator(self) -> None:
        """Make our side of every rank of the policy; the first sync connects."""
        options = {"verify": self._verify, "timeout": self._timeout, "backend": self._backend}
        self._got(
            self._on_policy(
                "init_checkpoint_engine", backend=BACKEND, bucket_size_bytes=0, engine_kwargs=options
            )
        )

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> None:
        """One refit of all engines. Raises the policy's or an engine's ReshardError where it fails; the next one
        connects again."""
        if kv_scales is not None:
            raise ReshardError("scales of an fp8 key-value cache are no weights: set kv_cache_dtype=auto")
        self._stale = True
        self._policy.offload_before_refit()
        self._generation.prepare_for_generation(tags=["weights"])
        label = "prepare_for_generation/transfer_and_update_weights"
        try:
            with timer.time(label) if timer is not None else nullcontext():
                self._refit()
        finally:
            self._policy.offload_after_refit()
            self._generation.prepare_for_generation(tags=["kv_cache"])
        self._stale = False

    def shutdown(self) -> None:
        """Unmap the others' memory."""
        self._got(self._on_policy("finalize_checkpoint_engine"))
        self._new = True

    def _refit(self) -> None:
        ranks = len(self._policy.worker_group.workers)
        engines = len(self._generation.worker_group.workers)
        address = ""
        try:
            if self._new:
                address = self._address = self._got(self._on_policy("meeting_place"))[0]
                self._secret = new_secret()
                self._got(self._on_policy("meet", address=address, size=ranks + engines, secret=self._secret))
            policy = self._on_policy("send_weights_via_checkpoint_engine", kv_scales=None)
            each = engines // self._generation.dp_size
            given = [
                (address, self._secret, ranks, prefix, engines, self._timeout, self._verify)
                for prefix in range(0, engines, each)
            ]
            asked = self._on_engines("reshard_take", given)
            try:
                ray.get(policy + asked, timeout=WAITS * self._timeout)
            except ray.exceptions.RayError as error:
                # An engine that has died, or refuses before it comes, can tell nobody; the policy waits for it.
                calls = Calls({f"engine {i} of the rollout": one.future() for i, one in enumerate(asked)})
                if said := calls.failed(WORD_SECONDS):
                    RefitGroup.abort(self._address, said, secret=self._secret)
                    raise ReshardError(said) from error
                if isinstance(error, ray.exceptions.GetTimeoutError):
                    late = [f"rank {i} of the policy" for i, one in enumerate(policy) if not _is_done(one)]
                    late += [name for name, call in calls.calls.items() if not call.done()]
                    raise ReshardError(
                        f"{listed(late)} did not answer within {WAITS * self._timeout:g} s: dead or stalled"
                    ) from error
                raise
        except BaseException:
            self._new = True
            raise
        self._new = False

    def _got(self, calls: list[Any]) -> list[Any]:
        """Return what the policy's ranks answer. Raises ReshardError where one does not within the time limit."""
        try:
            answers: list[Any] = ray.get(calls, timeout=self._timeout)
            return answers
        except ray.exceptions.GetTimeoutError as error:
            late = [f"rank {index} of the policy" for index, one in enumerate(calls) if not _is_done(one)]
            raise ReshardError(
                f"{listed(late)} did not answer within {self._timeout:g} s: dead or stalled"
            ) from error

    def _on_policy(self, method: str, **arguments: Any) -> list[Any]:
        return self._policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method=method, method_kwargs=arguments
        )

    def _on_engines(self, method: str, arguments: list[tuple]) -> list[Any]:
        is_async = self._generation.cfg["vllm_cfg"]["async_engine"]
        return self._generation.worker_group.run_all_workers_multiple_data(
            "checkpoint_engine_rpc_async" if is_async else "checkpoint_engine_rpc",
            method_args=arguments,
            run_rank_0_only_axes=ONE_OF_EACH_ENGINE,
            common_kwargs={"checkpoint_method": method},
        )


def _is_done(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])


def refused(config: Mapping[str, Any]) -> str:
    """Why the weights of a policy with this config are not refitted; empty where they are."""
    generation = config.get("generation") or {}
    engine, kwargs = generation.get("vllm_cfg") or {}, generation.get("vllm_kwargs") or {}
    drafts = kwargs.get("speculative_config") or {}
    if ((config.get("megatron_cfg") or {}).get("peft") or {}).get("enabled"):
        return "the model has LoRA adapters (policy.megatron_cfg.peft)"
    if (config.get("draft") or {}).get("enabled"):
        return "a draft model is trained (policy.draft)"
    if config.get("quant_cfg") or generation.get("quant_cfg"):
        return "the model is quantized (quant_cfg)"
    if engine.get("precision") == "fp8" or kwargs.get("quantization"):
        return "the rollout is quantized (vllm_cfg.precision)"
    if str(engine.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return "the rollout has an fp8 key-value cache (vllm_cfg.kv_cache_dtype)"
    if drafts and drafts.get("num_speculative_tokens") != 0:
        return "the rollout drafts tokens (vllm_kwargs.speculative_config)"
    return ""


def checked(verify: Any, timeout: Any, backend: Any, others: Mapping[str, Any]) -> tuple[bool, float, str]:
    """The options of ``policy.generation.refit_cfg``. Raises ReshardError for others."""
    where = f"policy.generation.refit_cfg[{BACKEND!r}]"
    unknown = set(others) - {"update_weights_bucket_memory_ratio", "release_after_refit"}
    if unknown:
        raise ReshardError(
            f"{where} has {sorted(unknown)}: it takes verify, timeout, backend and release_after_refit"
        )
    check_switch(verify, f"verify of {where}")
    check_seconds(timeout, f"timeout of {where}")
    check_backend(backend, f"backend of {where}")
    return verify, float(timeout), backend


def with_refits(setup: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's ``setup`` of a run, after which policy and vLLM sync by refits. Raises ReshardError, before anything is
    started, for what a refit does not cover."""

    @functools.wraps(setup)
    def refitting(master_config: Any, *args: Any, **kwargs: Any) -> Any:
        policy_config = master_config.policy
        generation = policy_config.get("generation") or {}
        if generation.get("backend") != "vllm":
            raise ReshardError(
                f"policy.generation.backend is {generation.get('backend')}: reshard refits vllm"
            )
        if not (policy_config.get("megatron_cfg") or {}).get("enabled"):
            raise ReshardError("reshard refits from Megatron here: set policy.megatron_cfg.enabled=true")
        if not generation["colocated"]["enabled"] or generation.get("refit_transport") is not None:
            raise ReshardError(
                "policy and vLLM do not share GPUs: run NeMo-RL's own script, with policy.generation."
                f"refit_transport={BACKEND}"
            )
        why = refused(policy_config)
        if why:
            raise ReshardError(f"{why}, which reshard does not refit: run NeMo-RL's own script")
        of_ours = renamed_options((generation.get("refit_cfg") or {}).get(BACKEND) or {})
        verify, timeout = of_ours.pop("verify", False), of_ours.pop("timeout", TIMEOUT)
        options = checked(verify, timeout, of_ours.pop("backend", "auto"), of_ours)
        engine = generation.setdefault("vllm_kwargs", {})
        if engine.setdefault("worker_cls", WORKER) != WORKER:
            raise ReshardError(
                f"vllm_kwargs.worker_cls is {engine['worker_cls']}: make that {WORKER}, or unset it"
            )
        found = setup(master_config, *args, **kwargs)
        policy, served = found[:2]
        served.weight_synchronizer = ColocatedSynchronizer(policy, served, *options)
        served.weight_synchronizer.init_communicator()
        return found

    return refitting


def main() -> None:
    """A script of NeMo-RL's that trains by GRPO, with refits."""
    if len(sys.argv) < 2:
        raise SystemExit(
            "python -m reshard.integrations.nemo_rl SCRIPT ...: give NeMo-RL's examples/run_grpo.py"
        )
    from nemo_rl.algorithms import grpo

    grpo.setup = with_refits(grpo.setup)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # What Ray pickles has to be of a module that others can import.
    from reshard.integrations.nemo_rl import main as of_the_module

    of_the_module()
