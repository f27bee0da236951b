"""Refits on the CPU from real transformers models under ``fully_shard`` into vLLM's real model classes whose loader
transposes matrices."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch

from reshard import DeltaWriter, digest
from reshard.engines import VllmModel
from reshard.engines.placing import turned
from reshard.engines.tracing import views
from reshard.engines.workers.deltas import EngineDeltas
from reshard.live.digest import digest_of_models
from reshard.refit import connect
from reshard.refit.reporting.served_parts import served_parts
from reshard.refit.twins import handed_on_by
from reshard.trainers import FsdpModel
from tests.on_cpu.fsdp_on_cpu import copy_shards
from tests.on_cpu.refit_without_table_on_cpu import into_vllm, on_mesh, sharded
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start


def refit_in_turn(
    rank: int,
    sides: dict,
    mesh: dict[str, int],
    cases: dict[str, tuple[list[str], dict]],
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    delta: bool = False,
    round_bytes: int = turned.ROUND_BYTES,
) -> dict[str, dict]:
    """For each case, of two checkpoints and the engine's options: what the engine's ranks hold after a refit from the
    second and another from the first, what an engine holds to which they hand that on where they are trainers too, what
    their own loader makes of either, how many matrices come turned in how many rounds, and what is said where their
    digest, deltas, or weights as published are asked for."""
    turned.ROUND_BYTES = round_bytes
    is_trainer, is_engine, members = start(rank, sides)
    results: dict[str, dict] = {}
    for name, (checkpoints, options) in cases.items():
        model = on_mesh(checkpoints[1], mesh, dtype) if is_trainer else None
        engine = VllmModel(*into_vllm(checkpoints[0], load_format="dummy", **options)) if is_engine else None
        source = FsdpModel(model) if model is not None else None
        link = connect(members, source, engine, backend=backend, delta=delta)
        held, digests = [], []
        for checkpoint in reversed(checkpoints):
            if model is not None:
                copy_shards(on_mesh(checkpoint, mesh, dtype), model)
            digests.append((link.refit(verify=True).digest, digest(checkpoint, dtype="bfloat16").text))
            held.append(fingerprint(engine.module) if engine is not None else {})
        newcomer = None
        if is_trainer and engine is not None:
            newcomer = VllmModel(*into_vllm(checkpoints[1], load_format="dummy", **options))
            connect(members, handed_on_by(engine), newcomer).refit()
        if engine is not None:
            matrices = engine.turned.matrices
            results[name] = {
                "held": held,
                "expected": [fingerprint(into_vllm(one, **options)[0]) for one in reversed(checkpoints)],
                "matrices": len(matrices),
                "rounds": len({one.round for one in matrices.values()}),
                "slab": max(one.staged.tensor.nbytes for one in matrices.values()),
                "accounts": {account["what"] for account in engine.tensor_accounts()},
                "digests": digests,
                "sums": sums_of_turned(engine),
                "deltas": caught(lambda engine=engine: EngineDeltas(engine)),
                "handed on": fingerprint(newcomer.module) if newcomer is not None else None,
                "as published": caught(lambda engine=engine: engine.check_as_published()),
            }
        del link, model, engine, source, newcomer
        gc.collect()
    return results


def sums_of_turned(engine: VllmModel) -> dict[str, tuple[int, int]]:
    """What parts of the tensors whose transposes an engine serves add to a digest: as it is, and where an element of
    each of them has been changed, by tensor."""
    parts = served_parts(engine)
    regions = [matrix.served for matrix in engine.turned.matrices.values()]
    served = {region.tensor.data_ptr(): region.tensor for region in regions}
    before = parts.sums().take()
    for region in regions:
        region.tensor.detach().view(-1).view(torch.uint8)[region.offset * region.tensor.element_size()] ^= 1
    after = parts.sums().take()
    return {
        f"{box.name} {box.box}": pair
        for box, *pair in zip(parts.boxes, before, after, strict=True)
        if box.region.tensor.data_ptr() in served
    }


def exchanged(matrices: turned.TurnedMatrices) -> None:
    """Write two matrices of one shape each into the place of the other."""
    by_shape: dict[tuple, list] = {}
    for identity, one in matrices.matrices.items():
        by_shape.setdefault((one.rows, one.columns), []).append(identity)
    first, second, *_ = next(ids for ids in by_shape.values() if len(ids) > 1)
    own = matrices.matrices
    a, b = own[first], own[second]
    others = dict(own) | {first: a._replace(staged=b.staged), second: b._replace(staged=a.staged)}
    wrong = turned.TurnedMatrices(others)
    assert a.round == b.round, "both are there"
    matrices.write = wrong.write


def as_published(matrices: turned.TurnedMatrices) -> None:
    """Write elements in the order in which they arrive."""

    def write(number: int) -> None:
        for one in matrices.matrices.values():
            if one.round == number:
                served, arrived = one.views()
                served.copy_(arrived.t().reshape(served.shape))

    matrices.write = write


def nowhere(matrices: turned.TurnedMatrices) -> None:
    """Write nothing."""
    matrices.write = lambda number: None


def with_another_stride(members, source: FsdpModel, checkpoint: str, options: dict) -> str:
    """What is said at connect where the record of the engine's loader has columns further apart."""
    module, config = into_vllm(checkpoint, load_format="dummy", **options)
    in_rows = views._in_rows

    def further(*args):
        copy = in_rows(*args)
        return copy._replace(strides=(1, copy.strides[1] + 1)) if copy.strides else copy

    views._in_rows = further
    try:
        return caught(lambda: connect(members, source, lambda: VllmModel(module, config)))
    finally:
        views._in_rows = in_rows


def faults(rank: int, sides: dict, cases: dict[str, tuple[list[str], dict]]) -> dict[str, dict[str, tuple]]:
    """What is said of a verified refit in which an engine writes transposes wrongly, and whether it may serve then, by
    case and fault; and of a trace that has another distance between columns."""
    _, _, members = start(rank, sides)
    results: dict[str, dict[str, tuple]] = {}
    for name, (checkpoints, options) in cases.items():
        source = FsdpModel(sharded(checkpoints[1], sides["trainer"]))
        said: dict[str, tuple] = {}
        spoil: Callable[[turned.TurnedMatrices], None]
        for spoil in (exchanged, as_published, nowhere):
            engine = VllmModel(*into_vllm(checkpoints[0], load_format="dummy", **options))
            link = connect(members, source, engine)
            spoil(engine.turned)
            said[spoil.__name__] = caught(lambda link=link: link.refit(verify=True)), engine.ready
            del link, engine
        said["another stride"] = with_another_stride(members, source, checkpoints[0], options), False
        results[name] = said
    return results


def out_of_memory(*_: object) -> None:
    """Fail as torch does where a GPU has no memory left."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")


def without_memory(
    rank: int, sides: dict, checkpoints: list[str], options: dict, backend: str
) -> dict[str, tuple[str, bool]]:
    """What each member says, and whether an engine's rank may serve then, where the first of these has no memory left
    as it makes the slab, writes transposes, or compares these; and after a whole refit."""
    turned.ROUND_BYTES = 1 << 16
    is_trainer, is_engine, members = start(rank, sides)
    first = rank == (0 if is_trainer else sides["trainer"])
    source = FsdpModel(sharded(checkpoints[1], sides["trainer"])) if is_trainer else None

    def engine(in_vain: bool = False) -> VllmModel:
        failing = mock.patch.object(turned.TurnedMatrices, "of", out_of_memory)
        with failing if in_vain and first else nullcontext():
            return VllmModel(*into_vllm(checkpoints[0], load_format="dummy", **options))

    def said(action: Callable[[], object]) -> str:
        try:
            return caught(action)
        except torch.OutOfMemoryError as error:
            return f"torch: {error}"

    results = {
        "slab": (
            said(
                lambda: connect(
                    members, source, partial(engine, True) if is_engine else None, backend=backend
                )
            ),
            False,
        )
    }
    made = engine() if is_engine else None
    link = connect(members, source, made, backend=backend)
    for step in ("write", "mismatches", ""):
        if step and first and made is not None:
            setattr(made.turned, step, out_of_memory)
        results[step] = said(lambda: link.refit(verify=True)), made is not None and made.ready
        if step and first and made is not None:
            delattr(made.turned, step)
    return results


def read_as_published(rank: int, sides: dict, cases: dict[str, tuple[list[str], str]]) -> dict[str, tuple]:
    """For each case, of two checkpoints and the place for a chain: the digests of a trainer of the first, and of the
    second, which it adds to the chain."""
    members = start(rank, sides)[2]  # kept until the other rank has joined them
    results = {}
    for name, (checkpoints, chain) in cases.items():
        source = FsdpModel(sharded(checkpoints[0], sides["trainer"]))
        before = digest_of_models(source, checkpoints[0]).text
        writer = DeltaWriter(source, checkpoints[0], chain)
        copy_shards(sharded(checkpoints[1], sides["trainer"]), source.model)
        writer.save()
        results[name] = before, digest_of_models(source, checkpoints[0]).text
    members.close()
    return results
