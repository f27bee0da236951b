"""Move a trainer's parameters, gradients and optimizer state to host memory and back.

    reshard.offload(models, optimizer)  # the engine may have the GPU
    reshard.onload(models, grads=False, states=False)  # before a refit; or it reads from host memory
    reshard.onload(models)  # before the next training step

Storages are moved. A storage's bytes are copied to pinned host memory, and it is resized to
nothing. Later it is resized to what it was, perhaps at another address, and the bytes are copied
back. Every tensor that views it (a parameter in DDP's buffer, the optimizer's shard of that buffer,
``main_grad``) stays the same tensor, so Megatron needs no notice. A refit looks up addresses each
time.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from reshard.core.errors import ReshardError, first_line
from reshard.core.limits import check_switch
from reshard.device.host_copies import Away, forget, remember
from reshard.device.staging import HostMemory
from reshard.trainers.shards import chunks_of, layers_of

PARAMS, GRADS, STATES = "params", "grads", "optimizer"


class Offloaded:
    """The offloaded storages of a trainer by kind, and the host memory that holds them."""

    def __init__(self, pinned: bool) -> None:
        self.away: dict[str, list[Away]] = {PARAMS: [], GRADS: [], STATES: []}
        spare: list[torch.Tensor] = []
        self.memory = {kind: HostMemory(pinned, spare) for kind in self.away}


_offloaded: WeakKeyDictionary[torch.nn.Module, Offloaded] = WeakKeyDictionary()


def offload(models: Sequence[torch.nn.Module] | torch.nn.Module, optimizer: Any = None, *, params: bool = True,
            grads: bool | Literal["drop"] = True, states: bool = True) -> int:  # fmt: skip
    """Move a trainer's tensors to host memory and free their own; return the bytes that were freed
    on this rank.

    `models` is Megatron's list of chunks, wrapped in DDP or not, `optimizer` Megatron's or torch's.
    `params` are parameters and buffers, `grads` the gradients and the buffers that they are summed
    in (``"drop"`` frees those without a copy, and they come back as zeros), `states` what only the
    optimizer has: its moments and the fp32 main parameters. What is away already stays so, and what
    a trainer has put on another device is left there.

    Until `onload` the trainer's tensors have no memory: no step, no save. A refit reads the parameters from
    host memory then. No other process may have the memory mapped, so connect without `keep_mapped`.

    Raises ReshardError, with nothing moved, if host memory is short or a storage cannot be resized.
    """
    chunks = chunks_of(models)
    if grads != "drop":
        check_switch(grads, "grads")
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    _refuse_registered(chunks)
    if device.type == "cuda":
        # Other streams may still use it, or the host memory that `onload` released.
        torch.cuda.synchronize(device)
    kept = _offloaded.setdefault(_innermost(chunks[0]), Offloaded(pinned=device.type == "cuda"))
    wanted = {PARAMS: params, GRADS: bool(grads), STATES: states}
    taken: list[tuple[str, Away]] = []
    try:
        storages = [entry for entry in _storages(chunks, optimizer, device) if wanted[entry[0]]]
        kept.memory[PARAMS].reserve(storage.nbytes() for kind, storage in storages if kind == PARAMS)
        for kind, storage in storages:
            dropped = kind == GRADS and grads == "drop"
            size = storage.nbytes()
            host = None if dropped else kept.memory[kind].allocate_parts(size)
            taken.append((kind, Away(storage, size, host)))
    except (ReshardError, RuntimeError, MemoryError) as error:
        for kind, memory in kept.memory.items():
            if not kept.away[kind]:
                memory.release()
        if isinstance(error, ReshardError):
            raise
        raise ReshardError(
            f"no host memory to offload this rank's share to ({first_line(error)}): offload less, or "
            f"grads='drop'"
        ) from error
    _copy_pairs(device, [(part, live) for _, away in taken for part, live in _parts(away)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for kind, away in taken:
        away.storage.resize_(0)
        kept.away[kind].append(away)
        remember(away)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return sum(away.size for _, away in taken)


def onload(models: Sequence[torch.nn.Module] | torch.nn.Module, *, params: bool = True, grads: bool = True,
           states: bool = True) -> int:  # fmt: skip
    """Bring back what `offload` moved, bit for bit; return the bytes that this rank has again.

    On a GPU the copies go on when this returns, before whatever is given to the current stream next. Raises
    ReshardError, with nothing moved, where the device has not enough memory.
    """
    kept = _offloaded.get(_innermost(chunks_of(models)[0]))
    if kept is None:
        return 0
    kinds = [kind for kind, wanted in ((PARAMS, params), (GRADS, grads), (STATES, states)) if wanted]
    back = [away for kind in kinds for away in kept.away[kind]]
    if not back:
        return 0
    device = back[0].storage.device
    grown: list[Away] = []
    try:
        for away in back:
            away.storage.resize_(away.size)
            grown.append(away)
    except RuntimeError as error:
        for away in grown:
            away.storage.resize_(0)
        size = sum(away.size for away in back)
        raise ReshardError(
            f"{device} has no {size:,} bytes for what was offloaded ({first_line(error)}): let the engine "
            f"sleep first, or bring back less"
        ) from error
    for away in back:
        if away.host is None:
            _bytes(away.storage).zero_()
    _copy_pairs(device, [(live, part) for away in back for part, live in _parts(away)])
    for away in back:
        forget(away)
    for kind in kinds:
        kept.away[kind] = []
        kept.memory[kind].release()
    return sum(away.size for away in back)


def _innermost(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and other wrappers: a trainer may pass either."""
    return list(layers_of(model))[-1]


def _refuse_registered(chunks: list[torch.nn.Module]) -> None:
    """Raise ReshardError if NCCL knows the buffers by their addresses."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "nccl_ub", False):
            raise ReshardError(
                "DDP's buffers are registered with NCCL at their addresses (nccl_ub), and offload would move "
                "them: unset nccl_ub"
            )


def _storages(
    chunks: list[torch.nn.Module], optimizer: Any, device: torch.device
) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yield (kind, storage) for every storage on the device that has memory, once. A shared one has
    the first kind of parameters, gradients, optimizer. Raises ReshardError for one that cannot be
    resized."""
    seen: set[int] = set()
    for kind, tensor in _tensors(chunks, optimizer):
        if tensor.device != device:
            continue
        if type(tensor.data) is not torch.Tensor:
            raise ReshardError(
                f"the trainer's {kind} have a {type(tensor.data).__name__}, which is several tensors in one, and "
                f"cannot be offloaded"
            )
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in seen:
            continue
        if not storage.resizable():
            raise ReshardError(
                f"the trainer's {kind} lie in memory that is not torch's own, and cannot be offloaded: a "
                f"tensor of shape {list(tensor.shape)}"
            )
        seen.add(storage.data_ptr())
        yield kind, storage


def _tensors(chunks: list[torch.nn.Module], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (kind, tensor) for all tensors of a trainer, parameters first."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        yield PARAMS, parameter.data
    for chunk in chunks:
        for _, buffer in chunk.named_buffers():  # DDP has an attribute ``buffers`` of its own
            yield PARAMS, buffer
    optimizers = _torch_optimizers(optimizer)
    updated = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    for parameter in (*parameters, *updated):
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if isinstance(gradient, torch.Tensor):
                yield GRADS, gradient
    for parameter in updated:
        yield STATES, parameter.data
    for each in optimizers:
        for state in each.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield STATES, value


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update the parameters, which Megatron's wraps, perhaps several.
    Raises ReshardError if there is none."""
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return []
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for each in optimizer.chained_optimizers for inner in _torch_optimizers(each)]
    inner = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(inner, "param_groups") or not hasattr(inner, "state"):
        raise ReshardError(
            f"optimizer is a {type(optimizer).__name__}: give Megatron's, or one of torch.optim"
        )
    return [inner]


def check_main_parameters(optimizer: Any) -> None:
    """Raise ReshardError if the main parameters of an optimizer cannot follow what is loaded
    into the model."""
    if optimizer is None:
        return
    if not hasattr(optimizer, "reload_model_params"):
        raise ReshardError(
            f"optimizer is a {type(optimizer).__name__}, which has no main parameters that follow the model's: give "
            f"Megatron's, or leave it out where it updates the model's own"
        )
    for each in _torch_optimizers(optimizer):
        if any("master_param" in state for state in each.state.values()):
            raise ReshardError(
                "the optimizer keeps its main parameters to itself (use_precision_aware_optimizer), and "
                "after its first step they do not follow the model's: load before that, or make the "
                "optimizer anew"
            )
        for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
            if parameter.numel() and not parameter.untyped_storage().size():
                raise ReshardError(
                    "the optimizer's main parameters have no memory, as after an offload: bring them back first "
                    "(reshard.onload, where reshard.offload has moved them)"
                )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _parts(away: Away) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each part of the host's copy, and the bytes that it belongs to."""
    start, whole = 0, _bytes(away.storage)
    for part in away.host or ():
        yield part, whole[start : start + part.numel()]
        start += part.numel()


def _copy_pairs(device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first, on a GPU in a stream of its own that the current
    one waits for."""
    if device.type != "cuda":
        for target, source in pairs:
            target.copy_(source)
        return
    current, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    copying.wait_stream(current)
    with torch.cuda.stream(copying):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    current.wait_stream(copying)
