"""What refits on the CPU have in common, whatever the engine: the two sides, the steps at which processes
meet, a trainer of real Megatron models, and refits in turn.

With ``RESHARD_TEST_DEVICE=cuda`` the models are moved to a GPU, all ranks to the same one, once
they are built: what is run then are its kernels and the mapping of other processes' memory.
"""

import contextlib
import os
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from reshard.engines.live import LiveEngine
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import megatron_on_cpu
from tests.tools import hosts

DEVICE = os.environ.get("RESHARD_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def on_the_cpu():
    """Models are built and loaded here, as if there were no GPU: what that replaces of torch is put
    back afterward."""
    if DEVICE == "cpu":
        yield
        return
    owners = {torch.cuda: ["is_available", "current_device", "get_device_properties", "synchronize", "empty_cache",
                           "get_rng_state"],
              torch.Tensor: ["cuda"], torch: ["tensor"]}  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, names in owners.items() for name in names]
    torch.cuda.is_available = lambda: False
    megatron_on_cpu.without_cuda()
    try:
        yield
    finally:
        for owner, name, plain in kept:
            setattr(owner, name, plain)


def trainer(
    flags: list[str], directory: str, ddp: bool = False, wide: bool = False, others: Sequence[str] = ()
):
    """Megatron's chunks for this rank in bf16, or where they are `wide` in fp32, loaded and
    wrapped; and a function that loads another checkpoint into the same memory, under GTP one of `others`.

    With `ddp` they are wrapped as for a distributed optimizer, which makes every parameter a view
    of one buffer; the embedding and one norm are frozen and stay outside of it.
    """
    under_gtp = any(flag.endswith("-num-weight-shards") for flag in flags)
    if under_gtp:
        from tests.tools import gtp_models
    with on_the_cpu():
        if under_gtp:
            models, args, wholes = gtp_models.build(flags, [directory, *others])
            whole = dict(zip([directory, *others], wholes, strict=True))
        else:
            models, args = megatron_on_cpu.build(flags)
        for model in models:
            if not wide:
                model.bfloat16()

    def load(other: str) -> None:
        with on_the_cpu():
            for model in models:
                model.cpu()
            if under_gtp:
                gtp_models.fill(models, whole[other])
            else:
                megatron_on_cpu.load(models, args, other)
        for model in models:
            model.to(DEVICE)

    load(directory)
    chunks = [model.to(DEVICE) if wide else Float16Module(model.config, model.to(DEVICE)) for model in models]
    if ddp:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(
                    "word_embeddings" not in name and "layers.1.input_layernorm" not in name
                )
        chunks = [distributed(chunk) for chunk in chunks]
    return chunks, load


def distributed(chunk: torch.nn.Module, **options) -> torch.nn.Module:
    """Megatron's DDP around a chunk, with its parameters in the distributed optimizer's buffer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    plain = {"use_distributed_optimizer": True, "overlap_grad_reduce": False, "bucket_size": None}
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(**plain | options), chunk)
    storages = {p.untyped_storage().data_ptr() for p in chunk.parameters() if p.requires_grad}
    assert len(storages) == len(wrapped.buffers) + len(wrapped.expert_parallel_buffers), (
        "the parameters are views of the buffers"
    )
    return wrapped


def bits_of(tensor: torch.Tensor) -> tuple:
    """Shape, dtype and a checksum of the bits of a tensor."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return (
        tuple(tensor.shape),
        str(tensor.dtype),
        zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if tensor.numel() else 0,
    )


def fingerprint(model: torch.nn.Module) -> dict[str, tuple]:
    """Shape, dtype and a checksum of the bits of every parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: bits_of(tensor) for name, tensor in named}


class Steps:
    """Processes that meet, or wait for one another, at named steps: files, so that nothing of what
    is tested has a part in it."""

    def __init__(self, sides: dict, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = Path(sides["folder"]), rank, size

    def reach(self, step: str) -> None:
        (self.folder / f"step {step} {self.rank}").touch()

    def wait(self, step: str, *ranks: int) -> None:
        """Until these ranks, or all others, have reached a step."""
        others = ranks or [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + 300
        while not all((self.folder / f"step {step} {rank}").exists() for rank in others):
            assert time.monotonic() < deadline, f"rank {self.rank} waits for {others} to reach '{step}'"
            time.sleep(0.01)

    def meet(self, step: str) -> None:
        self.reach(step)
        self.wait(step)

    def wait_for_the_end_of(self, rank: int) -> None:
        """Until the process that is this rank has ended."""
        pid = int((self.folder / f"process {rank}").read_text())
        deadline = time.monotonic() + 300
        while _runs(pid):
            assert time.monotonic() < deadline, f"rank {self.rank} waits for the end of rank {rank}"
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether there is such a process that has not ended: one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(rank: int, sides: dict) -> tuple[bool, bool, RefitGroup]:
    """Torch's own process group for this rank's side, and the members of both; whether the rank is
    a trainer's, an engine's.

    With `hosts` in `sides` the trainer's ranks run on the first of `tests.tools.hosts`, the engine's on the second;
    of ranks that are both, each half on one. With `engines` the engine's ranks are those of several, each with its
    options.
    """
    host, secret = sides.get("host", "127.0.0.1"), None
    if "hosts" in sides:
        on_the_first = sides["trainer"] // (2 if sides.get("together") else 1)
        hosts.enter(sides["hosts"], int(rank >= on_the_first))
        if sides.get("together"):
            os.environ.update(
                MASTER_ADDR=hosts.ADDRESSES[0], GLOO_SOCKET_IFNAME=f"host{int(rank >= on_the_first)}"
            )
        host, secret = hosts.ADDRESSES[0], "between the two hosts"
    n, m, folder, timeout = sides["trainer"], sides["engine"], sides["folder"], sides.get("timeout", 180)
    if sides.get("together"):
        assert n == m, "one world"
        world, index, name = n, rank, "all"
    elif rank < n:
        world, index, name = n, rank, "trainer"
    elif rank < n + m:
        number, index, world = place_in_engine(rank, sides)
        name = f"engine{number}"
    else:
        world, index, name = 1, 0, "idle"
    os.environ.update(RANK=str(index), WORLD_SIZE=str(world), LOCAL_RANK=str(index))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=index, world_size=world
    )
    if sides.get("together"):
        return True, True, RefitGroup.of_process_group(timeout=timeout)
    size = n + m + sides.get("idle", 0)
    Steps(sides, rank, size).meet("start")  # `timeout` is for what comes then
    members = RefitGroup.join(f"{host}:{sides['port']}", rank, size, timeout=timeout, secret=secret)
    return rank < n, n <= rank < n + m, members


def place_in_engine(rank: int, sides: dict) -> tuple[int, int, int]:
    """The number of the engine that a rank is of, its place there, and the engine's ranks."""
    index = rank - sides["trainer"]
    sizes = [options["tp"] for options in sides.get("engines", ())] or [sides["engine"]]
    for number, size in enumerate(sizes):
        if index < size:
            return number, index, size
        index -= size
    raise ValueError(f"rank {rank} is of no engine")


def refit_in_turn(
    rank: int,
    sides: dict,
    flags: list[str],
    checkpoints: list[tuple[str, str]],
    make_engine: Callable[[], LiveEngine],
    load_by_engine: Callable[[], list[dict[str, tuple]]],
    *,
    moving: bool = False,
    ddp: bool = False,
    verify: bool = True,
    ignored: list[str] | None = None,
    look: Callable[[torch.nn.Module], dict[str, tuple]] = fingerprint,
    **options,
):
    """Refit from each of these Megatron checkpoints in turn.

    `sides` is {"trainer": n, "engine": m, "together": bool, ...}. `moving` parameters get new memory
    before every refit; `ddp` wraps them for a distributed optimizer; of names with an end that is
    `ignored` nothing is told. Returns, for engine ranks, what the engine then holds, what its own
    loader makes of the Hugging Face checkpoints (`load_by_engine`), the names whose address has
    changed, the reports, and the version.
    """
    is_trainer, is_engine, members = start(rank, sides)
    source = destination = load = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1], ddp, others=[mcore for _, mcore in checkpoints])
        source = MegatronModel(chunks)
    if is_engine:
        destination = make_engine()
    link = connect(members, source, destination, **options)
    addresses = {name: t.data_ptr() for name, t in destination.tensors.items()} if destination else {}
    held, reports = [], []
    for step, (_, mcore) in enumerate(checkpoints):
        if step and load is not None:
            load(mcore)
        if moving and source is not None:
            give_new_memory(source)
        reports.append(link.refit(version=10 + step, verify=verify).to_dict())
        held.append(without(ignored, look(destination.module)) if destination else None)
    moved = [
        name
        for name, t in (destination.tensors.items() if destination else ())
        if t.data_ptr() != addresses[name]
    ]
    loaded = [without(ignored, one) for one in load_by_engine()] if destination else []
    version = link.version
    ends = [weakref.ref(one) for one in (members, link.sender, link.receiver) if one is not None]
    del members, link
    assert not any(one() for one in ends), "they end with the link, and wait for no garbage collector"
    return held, loaded, moved, reports, version


def give_new_memory(source: MegatronModel) -> None:
    """Give a trainer's parameters and buffers new memory, and spoil the old."""
    for module in (module for model in source.models for module in model.modules()):
        for tensor in module._parameters.values():
            if tensor is not None:
                old, tensor.data = tensor.data, tensor.data.clone()
                old.fill_(-77.0)
        for name, old in [
            (n, b) for n, b in module._buffers.items() if b is not None
        ]:  # as `to` and `cpu` do
            module._buffers[name] = old.clone()
            old.fill_(-77.0)


def without(ends: list[str] | None, found: dict[str, tuple]) -> dict[str, tuple]:
    return {name: value for name, value in found.items() if not name.endswith(tuple(ends or ()))}


def held_by(placement) -> dict:
    """The boxes of each local tensor, wherever they lie in it."""
    return {
        identity: [(part.name, part.box) for part in tensor.parts]
        for identity, tensor in placement.tensors.items()
    }
