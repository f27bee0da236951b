"""slime: its weight sync as a refit, by a line of the command. `docs/guides/trainers/slime.md` has it.

    --custom-megatron-init-path reshard.integrations.slime.use_refits

slime calls that function in every rank of the actor, before it makes what updates the rollout's weights.
SGLang's schedulers load reshard's plugin by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("slime", "ray", "slime", "torch"):
    import ray
    import torch
    import torch.distributed as dist
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.utils.distributed_utils import get_gloo_group

from reshard.comm.background import in_background
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.engines.sglang.calls import NO_PLUGIN, call_and_join, connect_request, refit_request, says_plugin
from reshard.engines.sglang.group import ASKED
from reshard.integrations.calls import Calls
from reshard.integrations.connection import Connection, SyncOptions
from reshard.integrations.meeting import agreed_meeting
from reshard.trainers.megatron import MegatronModel

ACTOR = "slime.backends.megatron_utils.actor"
# The classes of slime's that a refit takes the place of: rollouts on the actor's GPUs, and on others.
REPLACED = ("UpdateWeightFromTensor", "UpdateWeightFromDistributed")


def use_refits(arguments: Any) -> None:
    """Have slime's actor refit the rollout's weights in the place of its updates by tensors and by NCCL.

    Raises ReshardError if slime is to send weights as files, or has no such updates.
    """
    if arguments.update_weight_transport == "disk":
        raise ReshardError(
            "--update-weight-transport disk sends weights as files, and a refit does not: leave it out, or "
            "leave out --custom-megatron-init-path reshard.integrations.slime.use_refits"
        )
    actor = import_module(ACTOR)
    missing = [name for name in REPLACED if not hasattr(actor, name)]
    if missing:
        raise ReshardError(f"this slime's {ACTOR} has no {missing[0]}: tested with slime at 624b824a8")
    for name in REPLACED:
        setattr(actor, name, RefitWeights)


class BackedUpModel(MegatronModel):
    """A Megatron model whose memory slime's memory saver has taken away, read from slime's copies of its
    weights in pinned host memory.

    `weights_getter` returns the copies by their names, `named` yields the model's tensors by the same.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]],
        named: Callable[[], Any],
    ) -> None:
        super().__init__(models)
        self._weights_getter = weights_getter
        names = {id(tensor): name for name, tensor in named()}
        for shard, region in zip(self.shards, self._regions, strict=True):
            if id(region.tensor) not in names:
                raise ReshardError(
                    f"slime keeps no copy of {shard.key} while the model is offloaded: start it with "
                    f"--no-offload-train"
                )
        self._names = [names[id(tensor)] for tensor in self._tensors]

    def _now(self) -> list[Any]:
        copies = self._weights_getter()
        return [copies.get(name) for name in self._names]


class RefitWeights:
    """In the place of slime's ``UpdateWeightFromTensor`` and ``UpdateWeightFromDistributed``, with their
    methods. Made once in each of the actor's ranks, which all take part; the first calls the engines."""

    def __init__(
        self,
        args: Any,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]],
        **_: Any,
    ) -> None:
        self.args, self.model, self.weights_getter = args, model, weights_getter
        self.weight_version = 0
        self.rollout_engines: Sequence[Any] = ()
        self._sizes: list[int] = []
        self._source: MegatronModel | None = None
        self._connection = Connection(SyncOptions.of_environment("--train-env-vars"))

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        **_: Any,
    ) -> None:
        """Keep the engines, since some are new: the next update connects."""
        self._connection.close()
        self.rollout_engines = rollout_engines
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        self._sizes = list(counts)

    def disconnect_rollout_engines(self) -> None:
        """Forget the connection, before slime ends its process groups."""
        self._connection.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return nothing: a refit has no metrics of slime's."""
        return {}

    def update_weights(self) -> None:
        """Pause the engines, refit them and resume them, as slime does.

        Raises ReshardError, on all ranks, if it fails; the next update connects again.
        """
        self.weight_version += 1
        self._ask("pause_generation")  # which aborts the requests: none has keys of earlier weights
        self._ask("flush_cache")
        dist.barrier(group=get_gloo_group())
        connection = self._connection
        with connection.dropped_on_failure():
            if connection.link is None:
                self._connect()
            update = refit_request(self.weight_version, connection.options.verify)
            calls = self._call("update_weights_from_distributed", [update] * len(self.rollout_engines))
            connection.refit(self.weight_version, calls=calls)
        self._ask("continue_generation")
        dist.barrier(group=get_gloo_group())

    def _connect(self) -> None:
        """Meet the engines: the members are the actor's ranks, and the ranks of each engine after
        these."""
        options, trainers = self._connection.options, dist.get_world_size()
        size = trainers + sum(self._sizes)
        address, secret = agreed_meeting(get_gloo_group())
        firsts = [trainers + sum(self._sizes[:index]) for index in range(len(self._sizes))]
        requests = [
            connect_request(address, first, size, timeout=options.timeout, secret=secret) for first in firsts
        ]
        calls = self._call("init_weights_update_group", requests, before=_check_plugin)
        members = RefitGroup.join(address, dist.get_rank(), size, options.timeout, secret)
        self._connection.connect(members, self.source, calls=calls)

    def source(self) -> MegatronModel:
        """Return this rank's model, or slime's copies of it where it is offloaded between steps."""
        if self._source is None:
            if getattr(self.args, "offload_train", False):
                self._source = BackedUpModel(
                    self.model, self.weights_getter, lambda: named_params_and_buffers(self.args, self.model)
                )
            else:
                self._source = MegatronModel(self.model)
        return self._source

    def _call(
        self,
        method: str,
        arguments: list[dict[str, Any]],
        before: Callable[[Any], None] = lambda engine: None,
    ) -> Calls:
        """Call a method of each engine on the first rank, after what comes `before`; the calls run while it does
        its part."""
        if dist.get_rank() != 0:
            return Calls({})

        def call(engine: Any, given: dict[str, Any]) -> None:
            before(engine)
            call_and_join(partial(_answer, engine, method), given)

        return Calls(
            {
                f"the rollout's engine {index}": in_background(partial(call, engine, given))
                for index, (engine, given) in enumerate(zip(self.rollout_engines, arguments, strict=True))
            }
        )

    def _ask(self, method: str) -> None:
        """Call a method of each engine on the first rank, and wait for them."""
        if dist.get_rank() == 0:
            ray.get([getattr(engine, method).remote() for engine in self.rollout_engines])


def _check_plugin(engine: Any) -> None:
    """Raise ReshardError if an engine's SGLang has not loaded the plugin; see `check_plugin`. slime returns nothing
    where SGLang refuses this call."""
    if not says_plugin(_answer(engine, "destroy_weights_update_group", {"group_name": ASKED})):
        raise ReshardError(NO_PLUGIN)


def _answer(engine: Any, method: str, request: dict[str, Any]) -> Any:
    """Return what a method of an engine returns for a request. Raises what it raises, with the text of
    SGLang's answer, which slime adds to its error as a note."""
    return ray.get(getattr(engine, method).remote(**request))
