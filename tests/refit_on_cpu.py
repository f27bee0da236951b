"""Refits on the CPU: real Megatron models into vLLM's real model classes, several processes, the code path of the GPUs.

With ``RESHARD_TEST_DEVICE=cuda`` the models are moved to a GPU, all ranks to the same one, once they are built: what is run then are its kernels and the
mapping of other processes' memory.
"""

import contextlib
import os
import time
import weakref
import zlib
from functools import partial
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from reshard.core.errors import ReshardError
from reshard.engines.vllm import layers, reload
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.layout import vllm_placement
from reshard.engines.vllm.live import VllmModel
from reshard.refit import RefitGroup, connect, copies
from reshard.refit.tables import DST
from reshard.trainers.megatron import MegatronModel
from tests import megatron_on_cpu, two_hosts, vllm_on_cpu
from tests.ranks import caught

DEVICE = os.environ.get("RESHARD_TEST_DEVICE", "cpu")


@contextlib.contextmanager
def on_the_cpu():
    """Models are built and loaded here, as if there were no GPU: what that replaces of torch is put back afterward."""
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
    """Megatron's chunks for this rank in bf16, or where they are `wide` in fp32, loaded and wrapped; and a function that loads another
    checkpoint into the same memory.

    With `ddp` they are wrapped as for a distributed optimizer, which makes every parameter a view of one buffer; the embedding and
    one norm are frozen and stay outside of it.
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
    """Processes that meet, or wait for one another, at named steps: files, so that nothing of what is tested has a part in it."""

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
    """Torch's own process group for this rank's side, and the members of both; whether the rank is a trainer's, an engine's.

    With `hosts` in `sides` the trainer's ranks run on the first of `two_hosts`, the engine's on the second.
    """
    host, secret = sides.get("host", "127.0.0.1"), None
    if "hosts" in sides:
        two_hosts.enter(sides["hosts"], int(rank >= sides["trainer"]))
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

    `sides` is {"trainer": n, "engine": m, "together": bool, ...}; the engine starts with random weights. `moving` parameters get new
    memory before every refit; `ddp` wraps them for a distributed optimizer; `traced` takes the vLLM names out of the tables; `published` are
    the directories that vLLM's own loader is to load, if not those, names with an end that is `ignored` are not looked at. Returns, for engine ranks, what vLLM then holds, what
    its own loader makes of the two Hugging Face checkpoints, the names whose address has changed, and the reports.
    With `round_bytes` what vLLM quantizes itself comes in rounds of so many; `unknown` forgets the kernels of which we know how they serve from fp8 blocks.
    """
    reload.ROUND_BYTES = options.pop("round_bytes", reload.ROUND_BYTES)
    if options.pop("unknown", False):
        layers.BLOCK_KERNELS = layers.BLOCK_BACKENDS = ()
    traced, published, ignored = (options.pop(name, None) for name in ("traced", "published", "ignored"))
    if traced:
        without_vllm_names()
    moving, ddp, verify = options.pop("moving", False), options.pop("ddp", False), options.pop("verify", True)
    is_trainer, is_engine, members = start(rank, sides)
    source = destination = load = None
    if is_trainer:
        chunks, load = trainer(flags, checkpoints[0][1], ddp)
        source = MegatronModel(chunks)
    if is_engine:
        model, config = engine_of(checkpoints[0][0], load_format="dummy", **engine)
        destination = VllmModel(model, config)
        assert traced or held_by(destination.placement) == held_by(
            vllm_placement(destination.model, destination.rank)
        ), "not by the table, but by the trace"
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
    version = link.version
    ends = [weakref.ref(one) for one in (members, link.sender, link.receiver) if one is not None]
    del members, link
    assert not any(one() for one in ends), "they end with the link, and wait for no garbage collector"
    return held, expected, moved, reports, version


def reloads_that_differ(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What a verified refit into an engine that quantizes itself says: as it is; where a scale, or a code, changes after it has arrived;
    where vLLM's processing fails, and where it leaves another number beside the weights; where a check ends in its middle; and at last as it is. And whether the layers and
    their kernels are the objects that they were, and what is said of them. Of a trainer in another process, what each refit says."""
    reload.ROUND_BYTES = 1  # a layer at a time
    is_trainer, is_engine, members = start(rank, sides)
    source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
    destination = None
    if is_engine:
        module, config = engine_of(checkpoint[0], load_format="dummy", **engine)
        destination = VllmModel(module, config)
    link = connect(members, source, destination)
    if not is_engine:
        return [caught(lambda: link.refit(verify=True)) for _ in range(7)]
    name = next(iter(destination.reloads.round_of))
    layer = module.get_submodule(name)
    layer.factor = 2.0

    def objects() -> list[int]:
        # in an order that says nothing
        return sorted(id(one) for some in destination.reloads.round_of
                      for owner in layers.processing_objects(module.get_submodule(some))
                      for one in (owner, *vars(owner).values(), *getattr(owner, "_parameters", {}).values()))  # fmt: skip

    def said() -> str:
        return caught(lambda: link.refit(verify=True))

    before, found = objects(), [said()]
    update_derived = destination.update_derived
    for change in (
        lambda: layer.weight_scale.data.mul_(1.5),
        lambda: layer.weight.data.view(torch.uint8)[3].bitwise_xor_(1),
    ):
        destination.update_derived = change
        found.append(said())
    destination.update_derived = update_derived
    process = layers.process

    def fails(*of):
        process(*of)
        raise RuntimeError("out of memory")

    def counts(*of):
        process(*of)
        if of[0] is layer:
            layer.factor *= 2

    for other in (fails, counts):
        reload.process = other
        found.append((said(), destination.ready, objects() == before))
    reload.process = process
    # A check that ends in its middle, when it has seen something, must not be remembered by the next.
    unlike, seen = destination.mismatches, []

    def ends(number):
        if seen:
            raise ReshardError("the check ends here")
        seen.extend(unlike(number))
        return seen

    destination.mismatches, destination.update_derived = ends, lambda: layer.weight_scale.data.mul_(1.5)
    found.append(said())
    destination.mismatches, destination.update_derived = unlike, update_derived
    return [*found, said(), objects() == before, link.describe()["quantized"]]


def static_inputs(
    rank: int,
    sides: dict,
    flags: list[str],
    mcore: str,
    directories: list[str],
    engine: dict,
    reloads: bool = True,
):
    """An engine that has loaded the first of these compressed checkpoints, refitted, from a checkpoint of other weights: what it holds, what
    engines hold that have loaded the others, what is said of it, whether a new look at it that a refit has spoiled finds the scales of its inputs,
    and what is said of one that has loaded nothing; whether what its kernels keep of scales is there after its memory was discarded, and what it
    holds after another refit since it has loaded the third one, where vLLM `reloads` such checkpoints."""
    _, _, members = start(rank, sides)
    module, config = engine_of(directories[0], **engine)
    source, destination = MegatronModel(trainer(flags, mcore)[0]), VllmModel(module, config)
    link = connect(members, source, destination)
    link.refit(verify=True)
    held, described = fingerprint(module), link.describe()["quantized"]
    destination.begin()
    again = caught(lambda: VllmModel(module, config))
    fresh = [loaded(directory, **engine) for directory in directories[1:]]
    dummy = caught(lambda: VllmModel(*engine_of(directories[0], load_format="dummy", **engine)))
    kept = [
        tensor
        for layer in module.modules()
        for tensor in layers.scales_in(
            getattr(getattr(layer, "quant_method", None), "moe_quant_config", None)
        ).values()
    ]
    before = [tensor.clone() for tensor in kept]
    for tensor in [*module.parameters(), *kept]:
        tensor.data[(0,) * tensor.ndim].fill_(77)
    guard = guard_of(module, config)
    guard._slept(2)
    guard._woken()
    link.refit(verify=True)
    woken = fingerprint(module) == held and all(map(torch.equal, kept, before))
    if reloads:
        load_anew(module, config, engine_of(directories[2], **engine)[1])
        guard.loaded()
        link.refit(verify=True)
    return held, fresh, described, again, dummy, (len(kept), woken), fingerprint(module)


def below_adapters(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What an engine holds that vLLM has wrapped for LoRA adapters, after a refit, by the names that its layers had before; what one holds that has
    loaded the checkpoint; how many layers are wrapped; and whether all wrappers are where they were."""
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


def load_anew(module: torch.nn.Module, config, theirs) -> None:
    """As vLLM's ``reload_weights`` loads the weights of another config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with set_current_vllm_config(config), torch.device("cpu"), torch.no_grad():
        weights = get_model_loader(config.load_config).get_all_weights(theirs.model_config, module)
        initialize_layerwise_reload(module)
        module.load_weights(weights)
        finalize_layerwise_reload(module, config.model_config)


def rebind_absorbed() -> None:
    """Let MLA put new matrices in the places of those that it has made of ``kv_b_proj``, as vLLM 0.24 and 0.25 do."""
    from vllm.model_executor.layers.attention import mla_attention

    def process(self, dtype: torch.dtype) -> None:
        weight = mla_attention.get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=dtype).T
        heads = weight.view(self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        keys, values = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        self.W_UV, self.W_UK_T = values.transpose(0, 1), keys.permute(1, 2, 0)

    mla_attention.MLAAttention.process_weights_after_loading = process


def absorbed_where_it_was(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, rebinds: bool
):
    """What lies after each of two refits where MLA's matrices lay when the engine was started, where CUDA graphs read them; what engines make that
    have loaded those checkpoints; how many matrices there are; and what a verified refit says where one of them changes afterward, and then."""
    if rebinds:
        rebind_absorbed()

    def matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": getattr(one, key).detach() for name, one in model.named_modules()
                for key in ("W_UV", "W_UK_T") if hasattr(one, key)}  # fmt: skip

    def bits(found: dict[str, torch.Tensor]) -> dict[str, int]:
        return {
            name: zlib.crc32(one.contiguous().view(torch.uint8).numpy().tobytes())
            for name, one in found.items()
        }

    _, _, members = start(rank, sides)
    chunks, load = trainer(flags, checkpoints[0][1])
    module, config = engine_of(checkpoints[0][0], load_format="dummy", **engine)
    destination = VllmModel(module, config)
    link = connect(members, MegatronModel(chunks), destination)
    at_start, held = matrices(module), []
    for step, (_, mcore) in enumerate(checkpoints):
        if step:
            load(mcore)
        link.refit(verify=True)
        held.append(bits(at_start))
    served = bits(matrices(module)) == held[-1]
    expected = [bits(matrices(engine_of(hf, **engine)[0])) for hf, _ in checkpoints]
    update_derived = destination.update_derived

    def spoiled() -> None:
        update_derived()
        one = matrices(module)["model.layers.1.self_attn.mla_attn.mla_attn.W_UV"]
        one[0, 0, 0] += 1

    destination.update_derived = spoiled
    said = caught(lambda: link.refit(verify=True))
    destination.update_derived = update_derived
    return held, expected, served, len(at_start), said, caught(lambda: link.refit(verify=True))


def of_infinities(
    rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict, number: float
):
    """What each rank says of a refit where the first one's part of a weight holds such a number, and of the next, without it; and whether the
    engine is fit after each."""
    _, _, members = start(rank, sides)
    chunks = trainer(flags, checkpoint[1])[0]
    destination = VllmModel(*engine_of(checkpoint[0], load_format="dummy", **engine))
    link, found = connect(members, MegatronModel(chunks), destination), []
    weight = next(
        one for name, one in chunks[0].named_parameters() if "layers.0.mlp.linear_fc2.weight" in name
    )
    kept = weight.data.view(-1)[7].clone()
    for value in (kept if rank else torch.tensor(number), kept):
        weight.data.view(-1)[7] = value
        found.append((caught(link.refit), destination.ready))
    return found


def failing_alone(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What each rank says of a refit in which vLLM's processing fails on the first one alone, which has scales to find with the others; of the
    next one; whether the engine is fit after each; and of verified ones in which a code, and a scale, of its first layer changes there."""
    reload.ROUND_BYTES = 1
    _, _, members = start(rank, sides)
    module, config = engine_of(checkpoint[0], load_format="dummy", **engine)
    destination = VllmModel(module, config)
    link = connect(members, MegatronModel(trainer(flags, checkpoint[1])[0]), destination)
    layer = module.get_submodule(next(iter(destination.reloads.round_of)))
    process, update_derived, found = layers.process, destination.update_derived, []

    def fails(*of):
        if of[0] is layer:
            raise RuntimeError("out of memory")
        process(*of)

    def refitted() -> None:
        found.append((caught(lambda: link.refit(verify=True)), destination.ready))

    if not rank:
        reload.process = fails
    refitted()
    reload.process = process
    refitted()
    for change in (
        lambda: layer.weight.data.view(torch.uint8)[3].bitwise_xor_(1),
        lambda: layer.weight_scale.data.mul_(1.5),
    ):
        if not rank:
            destination.update_derived = change
        refitted()
    destination.update_derived = update_derived
    refitted()
    return found


def blocks_that_differ(
    rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict, wide: bool
):
    """What each member says of verified refits into fp8 blocks: as it is, where a code, or a scale, changes after it has arrived, where parts
    of blocks that several ranks have do not arrive, if there are any, and at last as it is; and the engine's of scales that vLLM has made up, and at connect where ours are made in another way than vLLM's."""
    from reshard.engines.vllm import fp8
    from reshard.refit import blocks

    is_trainer, is_engine, members = start(rank, sides)
    source = MegatronModel(trainer(flags, checkpoint[1], wide=wide)[0]) if is_trainer else None
    by_config, destination = engine.pop("by_config"), None
    changes: list = [None] * 5
    if is_engine:
        module, config = engine_of(checkpoint[0], load_format="dummy", **engine)
        destination = VllmModel(module, config)
        name, scales = next(iter(destination.scales.items()))
        codes = destination.regions[name].tensor.view(torch.uint8)
        changes[1:3] = lambda: codes[-3].bitwise_xor_(1), lambda: scales.region.tensor[-1].mul_(1.5)
        update_derived, plain = destination.update_derived, copies.copy_on_host
    link, said = connect(members, source, destination), []
    for number, change in enumerate(changes):
        if is_engine:
            destination.update_derived, slab = change or update_derived, link.receiver.slab.memory
            if number == 3 and slab is not None:
                slab.fill_(1)
                copies.copy_on_host = partial(all_but, slab, plain)
        said.append(caught(lambda: link.refit(verify=True)))
        if is_engine:
            copies.copy_on_host = plain
    if not is_engine:
        return said
    cached = {"kv_cache_dtype": "fp8", "hf_overrides": {"quantization_config": by_config}}
    said.append(caught(lambda: VllmModel(*engine_of(checkpoint[0], load_format="dummy", **cached))))
    fp8.check_blocks.cache_clear()
    blocks.SMALLEST = 1e-3
    said.append(caught(lambda: VllmModel(module, config)))
    return said


def all_but(memory: torch.Tensor, copy, table) -> None:
    """Copy what does not go into this memory."""
    into = table[:, DST] - memory.data_ptr()
    copy(table[(into < 0) | (into >= len(memory))])


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
    """vLLM's parameters get new memory, the refit that finds them there fails, and the next one is whole; what the first said, and the
    names of what then is not what vLLM's own loader makes of the second checkpoint."""
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


def of_a_table_without(rank: int, sides: dict, directory: str, rows: list[str], traced: bool):
    """What is said of an engine of a family whose table lacks these rows, where vLLM's loader needs none of their tensors; and whether it is fit."""
    from reshard.models.family import families

    start(rank, sides)
    for family in families().values():
        kept = [row for row in family.rows["layer"] if not row.hf.startswith(tuple(rows))]
        family.rows["layer"] = tuple(kept)
    if traced:
        without_vllm_names()
    module, config = engine_of(directory, load_format="dummy")
    return caught(lambda: VllmModel(module, config)), guard_of(module, config).ready


def without_vllm_names() -> None:
    """Families that say nothing of vLLM's names."""
    from reshard.models.family import families

    for family in families().values():
        family.vllm_names = None
