"""NeMo-RL with Megatron and vLLM: its weight sync as a refit. `docs/guides/trainers/nemo-rl.md` has the
lines of config.

On GPUs of their own, `ReshardCheckpointEngine` is what ``policy.generation.refit_transport`` names.
On the same GPUs

    python -m reshard.integrations.nemo_rl examples/run_grpo.py --config ...

runs NeMo-RL's script with `colocated.ColocatedSynchronizer` in the place of its synchronizer of weights; on GPUs of
their own, with ``begin: true``, with `begun.BegunSynchronizer` before it.
vLLM's workers are `reshard.integrations.nemo_rl.ReshardWorker` in either. What a refit does
not cover is refused before a byte moves.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray
    from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError
from reshard.integrations.nemo_rl.drafter import source_of, update
from reshard.integrations.nemo_rl.driven import BACKEND
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Meeting, WeightSync, ray_address
from reshard.refit.pending.refits import Begun
from reshard.refit.trainer import Trainer

WORKER = "reshard.integrations.nemo_rl.ReshardWorker"  # vLLM's
WHERE = f"policy.generation.refit_cfg[{BACKEND!r}]"
# What NeMo-RL itself takes there beside our options.
NEMO_RL_OPTIONS = ("release_after_refit", "update_weights_bucket_memory_ratio")


class ReshardCheckpointEngine(CheckpointEngine):
    """The meeting and refits of a policy and rollouts on other GPUs; no tensor passes through it.
    Made in every rank of the policy and in every worker of vLLM.

    The `options` are those of `reshard.integrations.options.SyncOptions`. All members meet at the
    first sync, and anew after one that failed, or with `release_after_refit`. `is_driven` says that a
    `begun.BegunSynchronizer` begins syncs.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        release_after_refit: bool = False,
        is_driven: bool = False,
        **options: Any,
    ) -> None:
        self.sync = WeightSync(checked_options(options))
        if self.sync.options.begin and not is_driven:
            raise ReshardError(
                f"begin of {WHERE} is true, and NeMo-RL's own script begins no sync: start it with "
                "python -m reshard.integrations.nemo_rl"
            )
        self.begun: Begun | None = None  # that is to be switched to
        self.ticket = ""  # with which it was begun
        self.rank, self.size, self.secret = 0, 0, ""
        # A group of all members that lasts as long as they live, by which each hears of another's
        # death: NeMo-RL tells them nothing.
        self.lobby: RefitGroup | None = None
        self.next_address: str | None = None
        self.source: Trainer | None = None
        self.connects, self.syncs = True, 0

    def prepare(self) -> dict[str, Any]:
        """Return where the lobby could be; only the policy's first rank is taken. vLLM's own
        processes know no Ray."""
        if not ray.is_initialized():
            return {"address": ""}
        return {"address": ray_address(), "secret": new_secret()}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Enter the lobby, which the first rank of the policy serves; there it says before each
        connect where to meet."""
        self._enter(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Enter the lobby; see `init_policy_process_group`. Raises ReshardError in a worker of vLLM
        that is not ours."""
        from reshard.integrations.nemo_rl.worker import this_worker

        this_worker()
        self._enter(train_world_size + rollout_rank, train_world_size, rollout_world_size, metadata)

    def _enter(self, rank: int, policies: int, rollouts: int, metadata: list[Any]) -> None:
        self.rank, self.size, self.secret = rank, policies + rollouts, metadata[0]["secret"]
        self.lobby = None  # the one before ends first
        self.lobby = self._meeting(metadata[0]["address"]).join(rank)
        self.lobby.names = {
            member: f"rank {member} of the policy"
            if member < policies
            else f"rank {member - policies} of the rollout"
            for member in range(self.size)
        }
        self.lobby.begin("syncs")
        self.lobby.post("entered")
        self.next_address, self.connects, self.syncs = None, True, 0

    def meeting_place(self) -> str:
        """Return an address for a `DrivenSynchronizer`; see `ray_address`."""
        return ray_address()

    def meet(self, address: str, size: int, secret: str) -> None:
        """Connect there at the next sync, as a `DrivenSynchronizer` says."""
        self.sync.close()  # perhaps with members that are not among these
        self.next_address, self.size, self.secret, self.connects = address, size, secret, True

    def settle(self) -> None:
        """Wait, on a rank of the policy, until it is known what has become of what was begun last."""
        if self.sync.link is not None:
            self.sync.link.begun.settle()

    def begin(self) -> str:
        """Begin a refit, on every rank of the policy, whose weights may change when this returns; return why nothing
        was begun, as far as this rank knows."""
        link = self.sync.link
        if link is None:
            raise ReshardError(f"rank {self.rank} of the policy is not connected")
        update(self.source)
        self.ticket = link.group.ticket()
        self.begun = link.begin_refit(verify=self.sync.options.verify, called=self._lobby_failure)
        return self.begun.why

    def arrived(self) -> dict[str, Any]:
        """Return, on every rank of the policy, what has become of what was begun: the fields of a `BegunReport`, and
        the ``ticket`` with which this rank has begun it."""
        begun, self.begun = self.begun, None
        if begun is None:
            raise ReshardError(f"rank {self.rank} of the policy has begun nothing")
        return begun.wait().to_dict() | {"ticket": self.ticket}

    async def send_weights(self, weights: Any) -> None:
        """Refit, on every rank of the policy; connect first if that is new."""
        self.syncs += 1
        sync = self.sync
        with self._connecting_after_failure(), sync.dropped_on_failure():
            if self.connects or sync.link is None:
                worker = worker_of(weights)
                self.rank = worker.rank
                members = self._meeting(self.next_address or self._agree_on_address()).join(self.rank)
                with members.watching(self._lobby_failure):
                    sync.connect(members, lambda: self._source(worker))
            assert sync.link is not None
            update(self.source)
            with sync.link.group.watching(self._lobby_failure):
                sync.refit()

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        """Refit, in every worker of vLLM; no batch is left for NeMo-RL to load."""
        from reshard.integrations.nemo_rl.worker import this_worker

        self.syncs += 1
        options = self.sync.options
        with self._connecting_after_failure():
            if self.connects:
                address = self._agree_on_address()
                this_worker().reshard_connect_worker(
                    address, self.rank, self.size, timeout=options.timeout, secret=self.secret
                )
            this_worker().reshard_refit(verify=options.verify)
        if False:
            yield []

    def finalize(self) -> None:
        """Unmap the others' memory; the next sync connects again."""
        self.sync.close()
        self.connects = True

    @contextmanager
    def _connecting_after_failure(self) -> Iterator[None]:
        """Let the next sync connect if this one fails, and only then."""
        try:
            yield
        except BaseException:
            self.connects = True
            raise
        self.connects = False

    def _meeting(self, address: str) -> Meeting:
        return Meeting(address, self.size, self.sync.options.timeout, self.secret)

    def _lobby_failure(self) -> str:
        """Return a sentence on a member that is gone; empty while none is."""
        return self.lobby.failure() if self.lobby is not None else ""

    def _agree_on_address(self) -> str:
        """Return where to meet at this sync; the first rank says so in the lobby, by the number of
        the sync, which NeMo-RL starts on all of them."""
        if self.lobby is None:
            raise ReshardError(
                "this member has not entered the lobby: NeMo-RL has not called init_*_process_group"
            )
        if self.rank == 0:
            self.lobby.post(f"meet/{self.syncs}", ray_address().encode())
        return self.lobby.read(f"meet/{self.syncs}", 0).decode()

    def _source(self, worker: Any) -> Trainer:
        why = not_covered(worker.cfg)
        if why:
            raise ReshardError(f"{why}, which reshard does not refit: leave NeMo-RL its own weight sync")
        if self.source is None:
            self.source = source_of(worker)
        return self.source


def worker_of(weights: Any) -> Any:
    """Return the worker whose weights a generator yields that has not begun.

    NeMo-RL's generator is a method of its Megatron worker, and nothing else leads from there to the
    model. Raises ReshardError for others.
    """
    frame = getattr(weights, "gi_frame", None)
    worker = frame.f_locals.get("self") if frame is not None else None
    if not all(hasattr(worker, name) for name in ("model", "cfg", "rank")):
        raise ReshardError(
            "these are not the weights of NeMo-RL's Megatron worker: set policy.megatron_cfg.enabled=true, or leave "
            "policy.generation.refit_transport unset"
        )
    return worker


def not_covered(config: Mapping[str, Any]) -> str:
    """Return why the weights of a policy with this config are not refitted; empty if they are."""
    generation = config.get("generation") or {}
    engine, kwargs = generation.get("vllm_cfg") or {}, generation.get("vllm_kwargs") or {}
    if ((config.get("megatron_cfg") or {}).get("peft") or {}).get("enabled"):
        return "the model has LoRA adapters (policy.megatron_cfg.peft)"
    if config.get("quant_cfg") or generation.get("quant_cfg"):
        return "the model is quantized (quant_cfg)"
    if engine.get("precision") == "fp8" or kwargs.get("quantization"):
        return "the rollout is quantized (vllm_cfg.precision)"
    if str(engine.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return "the rollout has an fp8 key-value cache (vllm_cfg.kv_cache_dtype)"
    return ""


def checked_options(given: Mapping[str, Any]) -> SyncOptions:
    """Return the options `given` in ``policy.generation.refit_cfg``. Raises ReshardError for wrong
    ones, and for others."""
    options = SyncOptions.of_config(given, WHERE, lambda name: f"{name} of {WHERE}", NEMO_RL_OPTIONS)
    if given.get("release_after_refit", False):
        options.check_not_begun(f"begin of {WHERE}", "release_after_refit connects anew at every sync")
    return options
