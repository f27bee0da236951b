"""Models under Megatron's generalized tensor parallelism (GTP), on the CPU, with its own local layers: what a load
leaves in them, and what is saved of them, against Megatron's own cuts and gathers."""

from dataclasses import replace

import megatron.core.parallel_state as mpu
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.transformer import mlp
from torch.distributed.checkpoint.api import CheckpointException

import reshard
from tests.on_cpu import live_megatron_on_cpu, megatron_on_cpu
from tests.on_cpu.optimizer_on_cpu import Training
from tests.tools.gtp_models import Whole, build, fill, named
from tests.tools.oracle import bits

OPTIONS = {"make_vocab_size_divisible_by": 8}


def gathered(models) -> dict[str, torch.Tensor]:
    """The tensors of this rank, those under GTP gathered as Megatron does before it multiplies."""
    found = {}
    for index, model in enumerate(models):
        for name, tensor in named(model):
            if gtp.is_gtp_param(tensor):
                shards = [torch.empty_like(tensor) for _ in range(tensor.group.size())]
                torch.distributed.all_gather(shards, tensor.detach().clone(), group=tensor.group)
                tensor = tensor._strip_padding(torch.cat(shards))
            found[f"{index}:{name}"] = tensor.detach().as_subclass(torch.Tensor).clone()
    return found


def unlike(models, whole: Whole) -> list[str]:
    """The names of what is gathered that has other bits than these tensors."""
    expected = {f"{i}:{name}": t for i, values in enumerate(whole) for name, t in values.items()}
    return live_megatron_on_cpu.unlike(gathered(models), expected)


def save(rank: int, flags: list[str], source: str, directory: str, args: bool = True, **metadata) -> int:
    """Save such a model with Megatron's own code, with the arguments or without; how many of its parameters GTP
    has padded."""
    models, arguments, [whole] = build(flags, [source])
    fill(models, whole)
    megatron_on_cpu.save(models, directory, {"args": arguments} if args else {}, metadata or None)
    return sum(getattr(p, "pad_length", 0) > 0 for model in models for p in model.parameters())


def save_in_order(rank: int, flags: list[str], source: str, directory: str) -> None:
    """The same from a Megatron that would store the rows of gate and up in their own order, each shard in one."""
    plain = mlp.apply_swiglu_sharded_factory

    def in_order(tensor, offsets, *arguments, **options):
        shard = plain(tensor, offsets, *arguments, **options)
        if not gtp.is_gtp_param(tensor.data):
            return shard
        tp, shards = mpu.get_tensor_model_parallel_world_size(), tensor.data.group.size()
        rank, at = divmod(tensor.global_offset[len(offsets)] // tensor.local_shape[0], shards)
        half, within = divmod(at, shards // 2)
        index = (half * tp + rank) * (shards // 2) + within

        def build(key, data, replica_id, _):
            place = len(offsets), index, tp * shards
            options = {"replica_id": replica_id, "prepend_axis_num": len(offsets)}
            return ShardedTensor.from_rank_offsets(key, data, *offsets, place, **options)

        return replace(shard, build_fn=build)

    mlp.apply_swiglu_sharded_factory = in_order
    save(rank, flags, source, directory)


def load_and_save(
    rank: int, flags: list[str], checkpoints: list[str], hf: str, sources: list[str], folder: str
):
    """Load each of these sources, which hold the weights of the first checkpoint, and save and export them; then the
    second checkpoint. What differs from Megatron's after each load, what was exported, and the digest."""
    models, _, wholes = build(flags, checkpoints, torch.bfloat16)
    differ = []
    for source in sources:
        live_megatron_on_cpu.spoil(models)
        reshard.load(models, source, **OPTIONS)
        differ.append(unlike(models, wholes[0]))
    padded = [p for m in models for p in m.parameters() if getattr(p, "pad_length", 0)]
    last = [p for p in padded if p.group.rank() == p.group.size() - 1]
    assert all(not p[-min(len(p), p.pad_length) :].any() for p in last), "padding is zeros"
    exported = [(name, bits(tensor)) for name, tensor in reshard.export(models, hf, **OPTIONS)]
    digest = reshard.digest(models, hf_config=hf).text
    reshard.save(models, f"{folder}/hf", hf, format="hf", **OPTIONS)
    reshard.save(models, f"{folder}/mcore", hf, **OPTIONS)
    fill(models, wholes[1])
    differ.append(unlike(models, wholes[0]))
    return differ, exported, digest


def exchanged(rank: int, flags: list[str], source: str, hf: str, folder: str):
    """Save a model two of whose ranks of GTP have exchanged their shards of a weight."""
    models, _, [whole] = build(flags, [source], torch.bfloat16)
    fill(models, whole)
    [weight] = [
        p for m in models for n, p in m.named_parameters() if n.endswith("layers.1.mlp.linear_fc2.weight")
    ]
    shards = [torch.empty_like(weight) for _ in range(weight.group.size())]
    torch.distributed.all_gather(shards, weight.detach().clone(), group=weight.group)
    with torch.no_grad():
        weight.copy_(shards[1 - weight.group.rank()])
    reshard.save(models, folder, hf, format="hf", **OPTIONS)


def loaded_by_megatron(rank: int, flags: list[str], source: str, directories: list[str]):
    """What Megatron's own loader makes of each of these checkpoints under GTP: the names of what differs from the
    weights of `source`, or what it says."""
    models, args, [whole] = build(flags, [source], torch.bfloat16)
    differ = []
    for directory in directories:
        live_megatron_on_cpu.spoil(models)
        try:
            megatron_on_cpu.load(models, args, directory)
        except CheckpointException as error:
            differ.append([str(error)])
        else:
            differ.append(unlike(models, whole))
    return differ


def states_saved_and_loaded(rank: int, flags: list[str], source: str, saved: str, moved: str = ""):
    """Save a training under GTP whose moments follow from the main parameters, which are the weights of `source`; or
    load `moved`, and give the names of what differs from that. There is no step: a forward gathers on a GPU."""
    _, _, [whole] = build(flags, [source], torch.bfloat16)
    training = Training(flags)
    fill(training.models, whole)
    training.optimizer.reload_model_params()
    training.start()
    for each in training.optimizer.chained_optimizers:
        for p in (p for group in each.optimizer.param_groups for p in group["params"]):
            each.optimizer.state[p]["exp_avg"].copy_(p.detach() * 0.5)
            each.optimizer.state[p]["exp_avg_sq"].copy_(p.detach() ** 2)
    if not moved:
        training.save(saved, 3)
        return []
    expected = gathered(training.models) | training.states()
    training.spoil()
    training.load(moved)
    return live_megatron_on_cpu.unlike(gathered(training.models) | training.states(), expected)
