"""Live Megatron models as a home of weights, on the CPU: what a load leaves in them, held against
Megatron's own loader."""

import errno
import logging
import os
import time
from functools import partial
from pathlib import Path

import megatron.core.parallel_state as mpu
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.transformer.module import Float16Module

import reshard
from reshard.device import box_loader
from reshard.live import share_writer
from reshard.megatron.layers import full_width_norm
from reshard.storage.io import files
from tests.on_cpu import megatron_on_cpu
from tests.starting.ranks import caught
from tests.tools.disk import scribble
from tests.tools.oracle import bits, hf_tensors
from tests.tools.refit_sides import distributed

UNTOUCHED = -77.0


def chunks(flags: list[str], dtype: torch.dtype = torch.bfloat16, ddp: bool = False, **options):
    """This rank's chunks with numbers in them that no checkpoint has, bare and as a trainer wraps
    them, and Megatron's args."""
    models, args = megatron_on_cpu.build(flags)
    for model in models:
        model.to(dtype)
    wrapped = [Float16Module(model.config, model) for model in models] if dtype == torch.bfloat16 else models
    if ddp:
        wrapped = [distributed(chunk, **options) for chunk in wrapped]
    spoil(models)
    return models, wrapped, args


def spoil(models) -> None:
    """Put numbers into every parameter and router bias that no checkpoint has."""
    with torch.no_grad():
        for model in models:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point() and "inv_freq" not in name and "local_tokens" not in name:
                    tensor.fill_(UNTOUCHED)


def by_megatron(models, args, directory: str) -> dict[str, torch.Tensor]:
    """What Megatron's own loader makes of a checkpoint."""
    spoil(models)
    megatron_on_cpu.load(models, args, directory)
    return megatron_on_cpu.weights(models)


def unlike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names whose bits, dtypes or shapes differ, or that only one has."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or a[name].dtype != b[name].dtype
        or a[name].shape != b[name].shape
        or not torch.equal(a[name].flatten().view(torch.uint8), b[name].flatten().view(torch.uint8))
    )


def load_each(
    rank: int,
    flags: list[str],
    sources: list[str],
    oracle: str,
    other: str,
    theirs: str = "",
    ddp: bool = False,
):
    """Load each of these sources, which hold the same weights, then what Megatron saves of them to
    `theirs`, if that is given, and the weights of `other`; the names that differ from what
    Megatron's loader makes of `oracle`, for each, and the reports."""
    models, wrapped, args = chunks(flags, ddp=ddp)
    expected = by_megatron(models, args, oracle)
    addresses = [p.data_ptr() for model in models for p in model.parameters()]
    differ, reports = [], []
    if theirs:
        megatron_on_cpu.save(models, theirs)
        sources = [*sources, theirs]
    for source in [*sources, other]:
        spoil(models)
        options = (
            {"hf_config": sources[0]} if source == theirs else {}
        )  # which Megatron's checkpoint has not beside it
        reports.append(reshard.load(wrapped, source, **options).to_dict())
        differ.append(unlike(megatron_on_cpu.weights(models), expected))
    assert addresses == [p.data_ptr() for model in models for p in model.parameters()]
    return differ, reports, len(expected)


def refused(
    rank: int,
    flags: list[str],
    sources: list[tuple[str, dict]],
    dtype: str = "bfloat16",
    good: str = "",
):
    """What is said of each source with its options, and whether a parameter was touched; what is
    left of the process's threads."""
    models, wrapped, _ = chunks(flags, getattr(torch, dtype))
    said = []
    for source, options in sources:
        spoil(models)
        sentence = caught(partial(reshard.load, wrapped, source, **options))
        touched = [
            name
            for model in models
            for name, p in model.named_parameters()
            if not bool((p == UNTOUCHED).all())
        ]
        said.append((sentence, len(touched)))
    if good:
        models[-1].value_head = torch.nn.Linear(4, 1)
        said.append((caught(lambda: reshard.load(wrapped, good)), 0))
        del models[-1].value_head
        if models[0].pre_process:  # this is in no checkpoint of Megatron's either
            models[0].embedding.word_embeddings.adapter = torch.nn.Parameter(torch.zeros(3))
        said.append((caught(lambda: reshard.load(wrapped, good)), 0))
    return said


def cast_and_follow(rank: int, flags: list[str], source: str, expected: str, options: dict):
    """A load into bf16 parameters under Megatron's distributed optimizer: what differs from its
    loader's, and from them the fp32 main parameters before and after."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    models, wrapped, args = chunks(flags, ddp=True)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    plain_type = torch.Tensor.type  # it takes parameters on a GPU only
    torch.Tensor.type = lambda self, *a, **k: (
        plain_type(self, *a, **k) if a else plain_type(self).replace("torch.", "torch.cuda.")
    )
    optimizer = get_megatron_optimizer(config, wrapped)
    torch.Tensor.type = plain_type
    report = reshard.load(wrapped, source, optimizer=optimizer, **options)
    loaded = megatron_on_cpu.weights(models)
    mains = main_parameters(optimizer)
    optimizer.reload_model_params()
    return (
        unlike(loaded, by_megatron(models, args, expected)),
        mains,
        main_parameters(optimizer),
        report.to_dict(),
    )


def main_parameters(optimizer) -> list[torch.Tensor]:
    """The fp32 parameters that an optimizer steps."""
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def load_of_what_changes(rank: int, flags: list[str], source: str, file: str) -> list[str]:
    """What is said of a load while which the last rank gives a file of the source other numbers,
    after some boxes, and of one after that."""
    _, wrapped, _ = chunks(flags)
    box_loader.PINNED_BYTES = 1 << 14  # of which a small model has several
    left = [file] if rank == torch.distributed.get_world_size() - 1 else []

    def progress(done: int, total: int) -> None:
        if 0 < done < total and left:
            scribble(Path(left.pop()))

    load = partial(reshard.load, wrapped, source, workers=1)
    return [caught(partial(load, progress=progress)), caught(load)]


def verified(rank: int, flags: list[str], good: str, flipped: str, bare: str) -> list[str]:
    """What is said of loads that compare a source with its manifest, and of one that does not."""
    _, wrapped, _ = chunks(flags)
    loads = (good, True), (flipped, True), (bare, True), (flipped, False)
    return [caught(partial(reshard.load, wrapped, source, verify=verify)) for source, verify in loads]


def failing_load(rank: int, flags: list[str], source: str, fault: str) -> str:
    """A load in which the last rank's disk fails, or the rank dies, after its first box; what is said."""
    _, wrapped, _ = chunks(flags)
    plain, calls = box_loader.BoxReader.read_all, []
    box_loader.PINNED_BYTES = 1 << 14  # of which a small model has several

    def read(self, *args):
        calls.append(1)
        if rank == torch.distributed.get_world_size() - 1 and len(calls) > 1:
            if fault == "dies":
                os._exit(0)
            raise reshard.ReshardError("cannot read the file: Input/output error")
        time.sleep(0.005)
        return plain(self, *args)

    box_loader.BoxReader.read_all = read
    said = caught(lambda: reshard.load(wrapped, source, workers=1))
    if fault == "dies":
        torch.distributed.barrier = lambda *_: None  # one is gone
    return said


def save_each(rank: int, flags: list[str], hf: str, mcore: str, folder: str, ddp: bool = False):
    """Save the weights that Megatron's loader gives in every way below `folder`, the last in the
    background while they change; the reports."""
    models, wrapped, args = chunks(flags, ddp=ddp)
    by_megatron(models, args, mcore)
    options = {"make_vocab_size_divisible_by": 8}
    last = torch.distributed.get_world_size() - 1
    exported = [
        list(reshard.export(wrapped, hf, buffer_bytes=size, to=to, copy=copy, **options))
        for size, to, copy in ((30_000, None, True), (1 << 30, last, True), (30_000, None, False))
    ]
    held = {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}
    lying = [
        sum(tensor.untyped_storage().data_ptr() in held for _, tensor in tensors) for tensors in exported
    ]
    assert lying[:2] == [0, 0]
    exported = [[(name, bits(tensor)) for name, tensor in tensors] for tensors in exported]
    reports = [
        reshard.save(wrapped, f"{folder}/hf", hf, format="hf", **options),
        reshard.save(wrapped, f"{folder}/mcore", hf, **options),
    ]
    later = reshard.save(wrapped, f"{folder}/later", hf, background=True, iteration=7, **options)
    spoil(models)
    reports += [later.result(), reshard.save(wrapped, f"{folder}/spoiled", hf, format="hf", **options)]
    assert later.done()
    return [report.to_dict() for report in reports], exported, lying[2]


def save_to_store(rank: int, flags: list[str], hf: str, mcore: str, url: str, environment: dict[str, str]):
    """Save the weights that Megatron's loader gives to a store, as both formats and as an iteration in the background,
    and load them from there; the names that differ then, and what is said of a second save and of a spool that the last
    rank does not see."""
    os.environ.update(environment)
    models, wrapped, args = chunks(flags)
    expected = by_megatron(models, args, mcore)
    options = {"make_vocab_size_divisible_by": 8}
    notices = [
        *reshard.save(wrapped, f"{url}/hf", hf, format="hf", **options).notices,
        *reshard.save(wrapped, f"{url}/mcore", hf, **options).notices,
    ]
    later = reshard.save(wrapped, f"{url}/run", hf, background=True, iteration=7, **options)
    spoil(models)
    later.result()
    differ = []
    for name in ("hf", "mcore", "run"):
        spoil(models)
        reshard.load(wrapped, f"{url}/{name}", make_vocab_size_divisible_by=8)
        differ.append(unlike(megatron_on_cpu.weights(models), expected))
    said = [caught(lambda: reshard.save(wrapped, f"{url}/hf", hf, format="hf", **options))]
    said.append(caught(lambda: reshard.save(wrapped, f"{url}/run", hf, overwrite=True, **options)))
    if rank:
        os.environ["RESHARD_SPOOL"] += "/of-another-host"
    said.append(caught(lambda: reshard.save(wrapped, f"{url}/elsewhere", hf, **options)))
    return differ, said, notices


def export_beside(rank: int, flags: list[str], hf: str, mcore: str, folder: str):
    """What a language model exports that is a part of `hf`, and what is said of a save of it."""
    models, wrapped, args = chunks(flags)
    by_megatron(models, args, mcore)
    options = {"make_vocab_size_divisible_by": 8}
    exported = {name: bits(tensor) for name, tensor in reshard.export(wrapped, hf, **options)}
    return exported, caught(lambda: reshard.save(wrapped, folder, hf, **options))


class Heard(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def failing_save(
    rank: int,
    flags: list[str],
    hf: str,
    mcore: str,
    folder: str,
    fault: str,
    at: int,
    background: bool = False,
    **options,
):
    """A save in which rank `at` meets a fault after its second write, over a destination that is
    there; what is said, and what of a save after it."""
    models, wrapped, args = chunks(flags)
    by_megatron(models, args, mcore)
    torch.distributed.barrier()
    plain, calls = share_writer.write_boxes, []
    share_writer.PINNED_BYTES = 1 << 14  # of which a small model has several

    def write(*arguments):
        calls.append(1)
        if rank == at and len(calls) > 2 and fault == "dies":
            os._exit(0)
        if rank == at and len(calls) > 2:
            raise files.write_error(Path("a file"), OSError(getattr(errno, fault), "no more"))
        time.sleep(0.005)
        return plain(*arguments)

    share_writer.write_boxes = write
    said = []
    if background:
        heard = Heard()
        logging.getLogger("reshard").addHandler(heard)
        handle = reshard.save(wrapped, f"{folder}/out", hf, background=True, overwrite=True, workers=1)
        said += [
            caught(handle.result),
            caught(lambda: reshard.save(wrapped, f"{folder}/out", hf)),
            *heard.said,
        ]
    else:
        said.append(
            caught(lambda: reshard.save(wrapped, f"{folder}/out", hf, overwrite=True, workers=1, **options))
        )
    share_writer.write_boxes = plain
    if fault == "dies":
        torch.distributed.barrier = lambda *_: None  # one is gone
    else:
        said.append(caught(lambda: reshard.save(wrapped, f"{folder}/after", hf)))
    return said


def save_as_trained(rank: int, flags: list[str], source: str, run: str, iteration: int) -> None:
    """An iteration in the directory of a run, by Megatron-LM's own ``save_checkpoint``."""
    from megatron.training.checkpointing import save_checkpoint

    models, args = megatron_on_cpu.build(flags)
    megatron_on_cpu.load(models, args, source)
    args.save, args.ckpt_format, args.no_save_optim, args.no_save_rng = run, "torch_dist", True, True
    save_checkpoint(iteration, models, None, None, 0)


def save_iterations(rank: int, flags: list[str], hf: str, first: str, second: str, run: str):
    """Add iterations to the directory of a run: 7 and 20 of two checkpoints' weights, 30 with a
    disk that fills, and 7 once more; what Megatron's loader finds in the end that the second does
    not have, and what was said."""
    models, wrapped, args = chunks(flags)
    save = partial(reshard.save, wrapped, run, hf, make_vocab_size_divisible_by=8)
    by_megatron(models, args, first)
    save(iteration=7)
    expected = by_megatron(models, args, second)
    save(iteration=20, background=True).result()
    said = [
        caught(lambda: save(iteration=20)),
        caught(lambda: save(format="hf", iteration=30, overwrite=True)),
        caught(save),
        caught(lambda: save(overwrite=True)),
    ]
    plain = share_writer.write_boxes
    share_writer.write_boxes = full if rank else plain
    said.append(caught(lambda: save(iteration=30)))
    share_writer.write_boxes = plain
    found = by_megatron(models, args, run)
    save(iteration=7, overwrite=True)
    torch.distributed.barrier()
    return unlike(found, expected), unlike(by_megatron(models, args, run), expected), said


def apart(
    rank: int, flags: list[str], hf: str, mcore: str, folder: str, saves: list[dict], loads: list[dict]
):
    """What is said where the last rank asks for something else than the others, and how many
    parameters the loads have touched."""
    models, wrapped, args = chunks(flags)
    by_megatron(models, args, mcore)
    last = rank == torch.distributed.get_world_size() - 1
    save = {"destination": f"{folder}/out", "hf_config": hf}
    said = [caught(partial(reshard.save, wrapped, **(save | (one if last else {})))) for one in saves]
    spoil(models)
    load = {"source": hf}
    said += [caught(partial(reshard.load, wrapped, **(load | (one if last else {})))) for one in loads]
    said.append(caught(lambda: reshard.load(wrapped, hf) if last else list(reshard.export(wrapped, hf))))
    touched = [p for model in models for p in model.parameters() if not bool((p == UNTOUCHED).all())]
    return said, len(touched)


def save_of_transformer_engine(rank: int, flags: list[str], hf: str, mcore: str, folder: str) -> None:
    """A save of layers that look like Transformer Engine's, on the ranks that have layers."""
    models, wrapped, args = chunks(flags)
    by_megatron(models, args, mcore)
    kind = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    for model in models:
        if model.decoder.layers:
            model.decoder.more = kind()
    reshard.save(wrapped, f"{folder}/out", hf)


def failing_export(rank: int, flags: list[str], hf: str) -> str:
    """An export in which the last rank dies between two batches; what is said."""
    _, wrapped, _ = chunks(flags)
    stream = reshard.export(wrapped, hf, buffer_bytes=1 << 14)
    next(stream)
    if rank == torch.distributed.get_world_size() - 1:
        os._exit(0)
    torch.distributed.barrier = lambda *_: None  # one is gone
    return caught(lambda: list(stream))


def full(*arguments):
    """A disk on which nothing more can be written."""
    raise files.write_error(Path("a file"), OSError(errno.ENOSPC, "no more"))


def refused_save(rank: int, flags: list[str], cases: list[tuple[str, str, dict]]) -> list[str]:
    """What is said of each destination, config and options."""
    _, wrapped, _ = chunks(flags)
    return [caught(partial(reshard.save, wrapped, *case[:2], **case[2])) for case in cases]


def built(rank: int, hf: str, folder: str, layout: dict, from_config: bool):
    """Build a model from a config, load it, save it; return what it exports, and the sentences of
    two wrong layouts."""
    from megatron.core.transformer.module import Float16Module
    from transformers import AutoConfig

    from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu

    inside = without_gpu()
    inside.__enter__()  # until this process ends
    sizes, model = reshard.MegatronLayout(**layout), reshard.read_model(hf)
    wrong = [caught(lambda: initialize_parallel(reshard.MegatronLayout(tp=7)))]
    initialize_parallel(sizes)
    wrong.append(
        caught(lambda: build_megatron(model, reshard.MegatronLayout(tp=8), transformer_impl="local"))
    )
    chunks = build_megatron(model, sizes, transformer_impl="local")
    models = [Float16Module(chunk.config, chunk) for chunk in chunks]
    reshard.load(models, hf, dtype="bf16")
    config = AutoConfig.from_pretrained(hf) if from_config else hf
    reshard.save(models, f"{folder}/saved", config, format="hf")
    return {name: bits(tensor) for name, tensor in reshard.export(models, config)}, wrong


class SplitNorm(torch.nn.Module):
    """The weight of a norm over all heads as Megatron-Bridge's trainers hold it: of this rank's heads
    only."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        ranks, rank = (
            get() for get in (mpu.get_tensor_model_parallel_world_size, mpu.get_tensor_model_parallel_rank)
        )
        self.shards = min(ranks, heads)
        self.shard, self.repeat = divmod(rank, ranks // self.shards)
        self.weight = torch.nn.Parameter(torch.full((heads // self.shards * dim,), UNTOUCHED))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        key, before = prefix + "weight", len(sharded_offsets)
        split = (before, self.shard, self.shards)
        replica = (0, self.repeat, mpu.get_data_parallel_rank(with_context_parallel=True))
        return {key: ShardedTensor.from_rank_offsets(key, self.weight, *sharded_offsets, split, replica_id=replica,
                                                     prepend_axis_num=before)}  # fmt: skip


def with_split_norms(rank: int, flags: list[str], source: str) -> tuple[list[str], dict[str, tuple]]:
    """The norms whose weights a load has not left as they should be, and what is exported."""
    models, _, _ = chunks(flags)
    [model] = models
    config = model.config
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.q_layernorm = SplitNorm(config.num_attention_heads, config.kv_channels).bfloat16()
        attention.k_layernorm = SplitNorm(config.num_query_groups, config.kv_channels).bfloat16()
    reshard.load(models, source)
    tensors, wrong = hf_tensors(Path(source)), []
    for number, layer in enumerate(model.decoder.layers):
        for x in "qk":
            norm = getattr(layer.self_attention, f"{x}_layernorm")
            whole = tensors[f"model.layers.{number}.self_attn.{x}_norm.weight"]
            if not torch.equal(norm.weight, whole.chunk(norm.shards)[norm.shard]):
                wrong.append(f"{x} {number}")
    return wrong, {name: bits(tensor) for name, tensor in reshard.export(models, source)}


def gradients(
    rank: int, flags: list[str], directory: str, tokens: torch.Tensor, detached: bool = False
) -> dict[str, torch.Tensor]:
    """The gradients of attention's parameters on this rank, summed over tensor-parallel ranks where
    Megatron does that. Where `detached`, norms over all heads let none through what other ranks
    have summed.

    In evaluation mode: its local layers refuse to train experts with TP.
    """
    if detached:
        full_width_norm.copy_to_tensor_model_parallel_region = lambda squares: squares
    models, args = megatron_on_cpu.build(flags, parallel_output=True)
    megatron_on_cpu.load(models, args, directory)
    chunk = distributed(models[0])
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    n = inputs.shape[1]
    positions = torch.arange(n)[None].expand_as(inputs)
    mask = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
    chunk(inputs, positions, mask, labels=labels).mean().backward()
    _allreduce_non_tensor_model_parallel_grads([chunk], chunk.config, mpu.get_tensor_model_parallel_group())
    return {
        name.removeprefix("module."): parameter.main_grad.clone()
        for name, parameter in chunk.named_parameters()
        if "self_attention" in name
    }
