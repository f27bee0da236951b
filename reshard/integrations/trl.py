"""TRL's trainers that generate by its `VLLMGeneration`, as of GRPO and RLOO: their weight sync as a refit, by one line
before the trainer is made, which `docs/guides/trainers/trl.md` has.

TRL gathers each parameter on all ranks and hands it to vLLM's loader, in the trainer's processes (``colocate``) or over
the network (``server``). `use` replaces the methods that do so: a sync reads the shards of transformers' model where
they are and writes them to where vLLM serves them from. All else is TRL's, also that it merges a LoRA for the time of a
sync, and when the engine sleeps and wakes. What a refit does not cover (DeepSpeed's ZeRO-3, FSDP 1, quantized
parameters, adapters other than LoRA) takes TRL's own sync in the trainer's processes, and the log says so. With a
server it is refused, since that takes weights in one way.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("TRL", "trl", "accelerate"):
    from accelerate.utils import is_peft_model
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import DistributedBackend, VLLMGeneration, empty_cache

import torch
from vllm.utils.network_utils import get_ip

from reshard.comm.group import RefitGroup
from reshard.comm.ranks import is_first_rank, on_first_rank
from reshard.core.errors import ReshardError
from reshard.engines.vllm.live import VllmModel
from reshard.integrations.options import TIMEOUT, SyncOptions
from reshard.integrations.sync import WeightSync
from reshard.integrations.vllm.transfer import DEV_MODE, HttpClient, WeightTransfer
from reshard.refit.trainer import Trainer
from reshard.trainers.fsdp import FsdpModel

log = logging.getLogger("reshard.trl")
_TRLS_SYNC = VLLMGeneration.sync_weights
_options = SyncOptions()


def use(
    verify: bool = False, timeout: float = TIMEOUT, backend: str = "auto", keep_mapped: bool = False
) -> None:
    """Let TRL's trainers refit their engines. Those with a server have to be made after this.

    The arguments are those of `reshard.integrations.options.SyncOptions`. The last call's count. Raises ReshardError
    for wrong ones.
    """
    global _options
    options = SyncOptions(verify=verify, timeout=timeout, backend=backend, keep_mapped=keep_mapped)
    _options = options.checked(lambda name: f"{name} of trl.use")
    VLLMGeneration.sync_weights = _sync_weights
    vllm_generation.VLLMClient = ReshardClient


def _sync_weights(generation: VLLMGeneration) -> None:
    """Refit the engine of a trainer's rank, or do what TRL does, if a refit does not cover it. All ranks call it.

    Raises ReshardError on every rank if one fails; the next sync connects again.
    """
    if "_reshard_sync" not in vars(generation):
        generation._reshard_sync = (server_sync if generation.mode == "server" else ColocatedSync)(generation)
    generation._reshard_sync.run()


def server_sync(generation: VLLMGeneration) -> "ServerSync":
    """Return the refits of a trainer's server. Raises ReshardError where a refit does not cover it, or the trainer has
    met the server for TRL's own sync."""
    check_covered(left_to_trl(generation.model, generation.accelerator, generation._dist))
    if on_first_rank(lambda: not isinstance(generation.vllm_client, ReshardClient)):
        raise ReshardError(
            "the trainer has met its server for TRL's own sync: call trl.use() before it is made"
        )
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    return ServerSync(generation.model, url, lambda: generation.group_port)


class ReshardClient(VLLMClient):
    """TRL's client of a server that takes weights from reshard, which the trainer meets at the first sync."""

    def init_communicator(self, device: Any = 0) -> None:
        """Raise ReshardError unless the server does."""
        check_server(self.base_url, self.get_server_info())


def check_server(url: str, info: dict[str, Any]) -> None:
    """Raise ReshardError unless a server takes weights from reshard, by what it says of its config."""
    backend = (info["weight_transfer_config"] or {}).get("backend")
    if backend != "reshard":
        raise ReshardError(f"{url} takes weights by {backend or 'no backend'}: {DEV_MODE}")


def check_covered(why: str) -> None:
    """Raise ReshardError if there is a reason (`left_to_trl`) why a trainer with a server is not refitted."""
    if why:
        raise ReshardError(
            f"{why}, which no refit covers: leave trl.use() out, and start the server with "
            '--weight-transfer-config \'{"backend": "nccl"}\''
        )


def left_to_trl(model: Any, accelerator: Any, sharding: DistributedBackend) -> str:
    """Return why a trainer's weights are not refitted, empty if they are; the same on every rank."""
    if sharding.is_zero3:
        return "the parameters are partitioned by DeepSpeed's ZeRO-3"
    if sharding.fsdp_version == 1:
        return "the parameters are sharded by FSDP 1 (set fsdp_version to 2)"
    parameters = [*model.parameters()]
    # Packed codes may lie in tensors that call themselves bf16.
    if getattr(model, "is_quantized", False) or not all(map(torch.is_floating_point, parameters)):
        return "the parameters are quantized"
    if accelerator.device.type != "cpu" and any(parameter.is_cpu for parameter in parameters):
        return "the parameters are offloaded to the host"
    if is_peft_model(model) and model.prefix != "lora_":
        return f"the model has an adapter that is no LoRA ({model.prefix.rstrip('_')})"
    if is_peft_model(model) and any(".modules_to_save." in name for name, _ in model.named_parameters()):
        return "the model's adapter has modules_to_save"
    return ""


class ColocatedSync:
    """The refits of an engine in the trainer's processes."""

    def __init__(self, generation: VLLMGeneration) -> None:
        self.generation, self.weights, self.version = generation, WeightSync(_options), 0
        self.why = left_to_trl(generation.model, generation.accelerator, generation._dist)
        if self.why:
            log.warning("TRL's own weight sync is used: %s", self.why)

    def run(self) -> None:
        """Refit it, or do what TRL does."""
        if self.why:
            _TRLS_SYNC(self.generation)
            return
        llm, model = self.generation.llm, self.generation.model
        if self.generation.enable_sleep_mode:
            empty_cache()  # before vLLM maps memory
            llm.wake_up(tags=["weights"])
            self.generation._llm_weights_sleeping = False
        with _merged(model), self.weights.dropped_on_failure():
            if self.weights.link is None:
                members = RefitGroup.of_process_group(timeout=self.weights.options.timeout)
                self.weights.connect(members, lambda: _source(model), lambda: VllmModel.from_llm(llm))
            self.weights.refit(self.version)
        self.version += 1
        llm.reset_prefix_cache()


class ServerSync:
    """The refits of a ``vllm serve`` at an address from a `model`: the trainer's first rank calls it, and listens at a
    `port`, which is asked for at each connect."""

    def __init__(self, model: Any, url: str, port: Callable[[], int]) -> None:
        self.model, self.port, self.options, self.version = model, port, _options, 0
        self.client = HttpClient(url, self.options.timeout)
        self.transfer: WeightTransfer | None = None

    def run(self) -> None:
        """Refit it while it is paused. After a failure it stays so if its weights are half written."""
        try:
            transfer = self._transfer()
            on_first_rank(self.client.pause)
            with _merged(self.model):
                transfer.send(self.version, self.options.verify)
        except BaseException:
            self._drop()
            raise
        self.version += 1
        on_first_rank(self._go_on)

    def _transfer(self) -> WeightTransfer:
        """Return the connection, made now where there is none."""
        if self.transfer is None:
            self.transfer = WeightTransfer(
                _source(self.model),
                self.client,
                on_first_rank(lambda: f"{get_ip()}:{self.port()}"),
                timeout=self.options.timeout,
                backend=self.options.backend,
                keep_mapped=self.options.keep_mapped,
            )
        return self.transfer

    def _drop(self) -> None:
        """Give up the connection, so that the next sync makes another, and let the server serve what is whole: that may
        be what was sent."""
        transfer, self.transfer = self.transfer, None
        with suppress(ReshardError):
            if transfer is not None:
                transfer.close()
        with suppress(ReshardError):
            if is_first_rank() and self.client.has_whole_weights():
                self._go_on()

    def _go_on(self) -> None:
        self.client.reset_prefix_cache()
        self.client.resume()


def _source(model: Any) -> Trainer:
    """Return this rank's weights, of a model with a LoRA those that it is merged into."""
    source = FsdpModel(model)
    return source.below_adapter() if is_peft_model(model) else source


@contextmanager
def _merged(model: Any) -> Iterator[None]:
    """Have a LoRA merged into the weights inside, as TRL does."""
    if not is_peft_model(model):
        yield
        return
    try:
        model.merge_adapter()
        yield
    finally:
        model.unmerge_adapter()
