"""Refits on the CPU: real Megatron models into vLLM's real model classes, several processes, the
code path of the GPUs.

With ``RESHARD_TEST_DEVICE=cuda`` the models are moved to a GPU, all ranks to the same one, once
they are built: what is run then are its kernels and the mapping of other processes' memory.
"""

import contextlib
import os
import time
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.layout import vllm_placement
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.quantized import layers, reload
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests import megatron_on_cpu, two_hosts, vllm_on_cpu
from tests.ranks import caught

DEVICE = os.environ.get("RESHARD_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def on_the_cpu():
    """Models are built and loaded here, as if there were no GPU: what that replaces of torch is put
    back afterward."""
    if DEVICE == "cpu":
        yield
        return
    owners = {torch.cuda: ["is_available", "current_device", "get_device_properties", "synchronize", "empty_cache", "get_rng_state"],
              torch.Tensor: ["cuda"], torch: ["tensor"]}  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, names in owners.items() for name in names]
    torch.cuda.is_available = lambda: False
    megatron_on_cpu.without_cuda()
    try:
        yield
    finally:
        for owner, name, plain in kept:
            setattr(owner, name, plain)


def engine_of(directory: str, **options) -> tuple[torch.nn.Module, object]:
    """What `vllm_on_cpu.build` gives, where a refit is to find it."""
    with on_the_cpu():
        module, config = vllm_on_cpu.build(directory, **options)
    return module.to(DEVICE), config


def loaded(directory: str, **options) -> dict[str, tuple]:
    """The `fingerprint` of what vLLM's own loader makes of a directory."""
    with on_the_cpu():
        return fingerprint(vllm_on_cpu.build(directory, **options)[0])


def trainer(flags: list[str], directory: str, ddp: bool = False, wide: bool = False):
    """Megatron's chunks for this rank in bf16, or where they are `wide` in fp32, loaded and
    wrapped; and a function that loads another checkpoint into the same memory.

    With `ddp` they are wrapped as for a distributed optimizer, which makes every parameter a view
    of one buffer; the embedding and one norm are frozen and stay outside of it.
    """
    with on_the_cpu():
        models, args = megatron_on_cpu.build(flags)
        for model in models:
            if not wide:
                model.bfloat16()
        megatron_on_cpu.load(models, args, directory)

    def load(other: str) -> None:
        with on_the_cpu():
            for model in models:
                model.cpu()
            megatron_on_cpu.load(models, args, other)
        for model in models:
            model.to(DEVICE)

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

    With `hosts` in `sides` the trainer's ranks run on the first of `two_hosts`, the engine's on the second;
    of ranks that are both, each half on one.
    """
    host, secret = sides.get("host", "127.0.0.1"), None
    if "hosts" in sides:
        on_the_first = sides["trainer"] // (2 if sides.get("together") else 1)
        two_hosts.enter(sides["hosts"], int(rank >= on_the_first))
        if sides.get("together"):
            os.environ.update(
                MASTER_ADDR=two_hosts.ADDRESSES[0], GLOO_SOCKET_IFNAME=f"host{int(rank >= on_the_first)}"
            )
        host, secret = two_hosts.ADDRESSES[0], "between the two hosts"
    n, m, folder, timeout = sides["trainer"], sides["engine"], sides["folder"], sides.get("timeout", 180)
    if sides.get("together"):
        assert n == m, "one world"
        world, index, name = n, rank, "all"
    elif rank < n + m:
        world, index, name = (n, rank, "trainer") if rank < n else (m, rank - n, "engine")
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


def refit_twice(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refit from each of two Megatron checkpoints in turn.

    `sides` is {"trainer": n, "engine": m, "together": bool, ...}; the engine starts with random
    weights. `moving` parameters get new memory before every refit; `ddp` wraps them for a
    distributed optimizer; `traced` takes the vLLM names out of the tables; `published` are the
    directories that vLLM's own loader is to load, if not those, names with an end that is `ignored`
    are not looked at. Returns, for engine ranks, what vLLM then holds, what its own loader makes of
    the two Hugging Face checkpoints, the names whose address has changed, and the reports. With
    `nested` published names have a prefix, and vLLM's another one, as in models that also read
    images. With `round_bytes` what vLLM quantizes itself comes in rounds of so many; `unknown`
    forgets the kernels of which we know how they serve from fp8 blocks.
    """
    reload.ROUND_BYTES = options.pop("round_bytes", reload.ROUND_BYTES)
    if options.pop("unknown", False):
        layers.BLOCK_KERNELS = layers.BLOCK_BACKENDS = ()
    traced, published, ignored = (options.pop(name, None) for name in ("traced", "published", "ignored"))
    if traced:
        without_vllm_names()
    nested = nest_names() if options.pop("nested", False) else None
    moving, ddp, verify = options.pop("moving", False), options.pop("ddp", False), options.pop("verify", True)
    is_trainer, is_engine, members = start(rank, sides)
    source = destination = load = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1], ddp)
        source = MegatronModel(chunks)
    if is_engine:
        model, config = engine_of(checkpoints[0][0], **{"load_format": "dummy"} | engine)
        destination = VllmModel(model if nested is None else nested(model), config)
        if not traced and nested is None:
            by_rules = vllm_placement(destination.model, destination.rank)
            assert held_by(destination.placement) == held_by(by_rules), "not by the table, but by the trace"
    link = connect(members, source, destination, **options)
    addresses = {name: t.data_ptr() for name, t in destination.tensors.items()} if destination else {}
    held, reports = [], []
    for step, (_, mcore) in enumerate(checkpoints):
        if step and load is not None:
            load(mcore)
        if moving and source is not None:
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
        reports.append(link.refit(version=10 + step, verify=verify).to_dict())
        held.append(without(ignored, fingerprint(destination.module)) if destination else None)
    moved = [
        name
        for name, t in (destination.tensors.items() if destination else ())
        if t.data_ptr() != addresses[name]
    ]
    expected = (
        [without(ignored, loaded(hf, **engine)) for hf in published or [hf for hf, _ in checkpoints]]
        if destination
        else []
    )
    if nested is not None:
        expected = [{f"language_model.{name}": bits for name, bits in one.items()} for one in expected]
    version = link.version
    ends = [weakref.ref(one) for one in (members, link.sender, link.receiver) if one is not None]
    del members, link
    assert not any(one() for one in ends), "they end with the link, and wait for no garbage collector"
    return held, expected, moved, reports, version


def refit_as_held(rank: int, *arguments):
    """`refit_twice` from a trainer whose numbers are taken to be the published ones, as a negative
    control."""
    MegatronModel.as_published = lambda self, model: self
    return refit_twice(rank, *arguments)


def below_adapters(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What an engine holds that vLLM has wrapped for LoRA adapters, after a refit, by the names
    that its layers had before; what one holds that has loaded the checkpoint; how many layers are
    wrapped; and whether all wrappers are where they were."""
    _, _, members = start(rank, sides)
    vllm_on_cpu.choose_triton()
    how = engine | {"enable_lora": True, "max_lora_rank": 8}
    module, config = engine_of(checkpoint[0], load_format="dummy", **how)
    named = dict([*module.named_parameters(), *module.named_buffers()])
    module = vllm_on_cpu.wrap_for_adapters(module, config)
    wrapped = [(name, id(one)) for name, one in module.named_modules()]
    destination = VllmModel(module, config)
    link = connect(members, MegatronModel(trainer(flags, checkpoint[1])[0]), destination)
    link.refit(verify=True)
    held = {name: bits_of(tensor) for name, tensor in named.items()}
    layers_with = [name for name in destination.accounts if name.endswith("(LoRA)")]
    same = wrapped == [(name, id(one)) for name, one in module.named_modules()]
    return held, loaded(checkpoint[0], **how), len(layers_with), same


def connecting(
    rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict, **options
):
    """What each member says at connect."""
    is_trainer, is_engine, members = start(rank, sides)
    source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
    build = lambda: VllmModel(*engine_of(checkpoint[0], load_format="dummy", **engine))  # noqa: E731
    return caught(lambda: connect(members, source, build() if is_engine else None, **options))


def without(ends: list[str] | None, found: dict[str, tuple]) -> dict[str, tuple]:
    return {name: value for name, value in found.items() if not name.endswith(tuple(ends or ()))}


def held_by(placement) -> dict:
    """The boxes of each local tensor, wherever they lie in it."""
    return {
        identity: [(part.name, part.box) for part in tensor.parts]
        for identity, tensor in placement.tensors.items()
    }


def moved_before_a_failure(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict
):
    """vLLM's parameters get new memory, the refit that finds them there fails, and the next one is
    whole; what the first said, and the names of what then is not what vLLM's own loader makes of
    the second checkpoint."""
    _, _, members = start(rank, sides)
    chunks, load = trainer(flags, checkpoints[0][1])
    module, config = engine_of(checkpoints[0][0], load_format="dummy", **engine)
    link = connect(members, MegatronModel(chunks), VllmModel(module, config))
    link.refit()
    load(checkpoints[1][1])
    for tensor in module.parameters():
        old = tensor.data
        tensor.data = old.clone()
        old.fill_(-77.0)
    said = caught(lambda: link.refit(version=100 + rank))
    link.refit()
    held, expected = fingerprint(module), loaded(checkpoints[1][0], **engine)
    return said, sorted(name for name in expected if held[name] != expected[name])


def of_a_table_without(
    rank: int, sides: dict, directory: str, rows: list[str], traced: bool, engine: dict, extra: str
):
    """What is said of an engine of a family whose table lacks these rows, where vLLM's loader needs
    none of their tensors, or of one whose last norm has another tensor, a parameter or a buffer
    called `extra`; and whether it is fit."""
    from reshard.models.family import families

    start(rank, sides)
    for family in families().values():
        kept = [row for row in family.rows["layer"] if not row.hf.startswith(tuple(rows))]
        family.rows["layer"] = tuple(kept)
    if traced:
        without_vllm_names()
    module, config = engine_of(directory, load_format="dummy", **engine)
    if extra:
        norm = module.get_submodule("model.norm")
        if extra == "table":
            norm.register_buffer(extra, torch.zeros(3, dtype=torch.int64))
        else:
            norm.register_parameter(extra, torch.nn.Parameter(torch.zeros(3)))
    return caught(lambda: VllmModel(module, config)), guard_of(module, config).ready


def nest_names() -> type[torch.nn.Module]:
    """Give all families' published names, and vLLM's, the prefixes of models that also read images;
    return the class of such a model in vLLM around that of the text, which vLLM's own loader fills."""
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    from reshard.engines.vllm.names import FAMILIES
    from reshard.models.family import families

    prefixes = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    for name, family in families().items():
        family.layers = "model.language_model.layers."
        family.rows["model"] = tuple(
            replace(row, hf=row.hf.replace("model.", "model.language_model.", 1))
            for row in family.rows["model"]
        )
        if name in FAMILIES:
            FAMILIES[name] = FAMILIES[name]._replace(prefixes=tuple(prefixes.items()))

    class Nested(torch.nn.Module):
        def __init__(self, language_model: torch.nn.Module) -> None:
            super().__init__()
            self.language_model = language_model

        def load_weights(self, weights):
            mapper = WeightsMapper(orig_to_new_prefix=prefixes)
            return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)

    return Nested


def without_vllm_names() -> None:
    """Families that the engine has no names for."""
    from reshard.engines.vllm.names import FAMILIES

    FAMILIES.clear()
