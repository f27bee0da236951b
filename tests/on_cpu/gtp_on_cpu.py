"""Models under Megatron's generalized tensor parallelism (GTP), on the CPU, with its own local layers: what a load
leaves in them, and what is saved of them, against Megatron's own cuts and gathers."""

import megatron.core.parallel_state as mpu
import torch
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
from megatron.core.tensor_parallel import gtp_api

import reshard
from tests.on_cpu import live_megatron_on_cpu, megatron_on_cpu
from tests.tools.oracle import bits

FLAGS = "--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards"
OPTIONS = {"make_vocab_size_divisible_by": 8}
# A rank's whole tensors of each chunk, as they would be without GTP.
Whole = list[dict[str, torch.Tensor]]


plain_slice = gtp._gtp_slice_one_param


def sliced(param, *arguments, **options):
    """What Megatron cuts of a parameter, an expert's still marked as one: of its classes for experts only those of
    Transformer Engine mark it after that."""
    shard = plain_slice(param, *arguments, **options)
    if hasattr(param, "allreduce"):
        shard.allreduce = param.allreduce
    return shard


def allow_gtp() -> None:
    """Let Megatron save and load GTP's shards without Transformer Engine, which its gathers need, and save them as
    plain tensors, which they are once they are copied from a GPU."""
    gtp.HAVE_TE = gtp_api.HAVE_GTP = True
    gtp.QuantizedTensor, gtp._gtp_slice_one_param = (), sliced
    gtp.GTPShardedParam.to = lambda self, *a, **k: torch.Tensor.to(self, *a, **k).as_subclass(torch.Tensor)


def build(flags: list[str], directories: list[str], dtype: torch.dtype = torch.float32):
    """This rank's chunks under GTP, Megatron's args, and for each of these checkpoints what Megatron's loader reads
    from it into the same ranks without GTP."""
    allow_gtp()
    without = [
        word for at, word in enumerate(flags) if word not in FLAGS and flags[max(at - 1, 0)] not in FLAGS
    ]
    models, args = built(without, dtype)
    wholes: list[Whole] = []
    for directory in directories:
        megatron_on_cpu.load(models, args, directory)
        wholes.append([{n: t.clone() for n, t in named(model)} for model in models])
    torch.distributed.barrier()
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
    return *built(flags, dtype), wholes


def built(flags: list[str], dtype: torch.dtype):
    models, args = megatron_on_cpu.build(flags)
    return [model.to(dtype) for model in models], args


def named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def fill(models, whole: Whole) -> None:
    """Give the chunks these tensors, of which Megatron cuts this rank's shards."""
    with torch.no_grad():
        for model, values in zip(models, whole, strict=True):
            for name, tensor in named(model):
                value = values[name]
                if gtp.is_gtp_param(tensor):
                    value = gtp._gtp_slice_one_param(value, tensor.group, name=name)
                    assert value.pad_length == tensor.pad_length
                tensor.copy_(value)


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


def load_and_save(
    rank: int, flags: list[str], checkpoints: list[str], hf: str, sources: list[str], folder: str
):
    """Load each of these sources, which hold the weights of the first checkpoint, and save and export them; then the
    second checkpoint. What differs from Megatron's after each load, and what was exported."""
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
    reshard.save(models, f"{folder}/hf", hf, format="hf", **OPTIONS)
    reshard.save(models, f"{folder}/mcore", hf, **OPTIONS)
    fill(models, wholes[1])
    differ.append(unlike(models, wholes[0]))
    return differ, exported


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
    weights of `source`."""
    models, args, [whole] = build(flags, [source], torch.bfloat16)
    differ = []
    for directory in directories:
        live_megatron_on_cpu.spoil(models)
        megatron_on_cpu.load(models, args, directory)
        differ.append(unlike(models, whole))
    return differ


def states_saved_and_loaded(rank: int, flags: list[str], source: str, saved: str, moved: str = ""):
    """Save a training under GTP whose moments follow from the main parameters, which are the weights of `source`; or
    load `moved`, and give the names of what differs from that. There is no step: a forward gathers on a GPU."""
    from tests.on_cpu.optimizer_on_cpu import Training

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
