"""Digests of live models, Megatron's and under FSDP2, and of vLLM's real model classes, on the ranks of one group."""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist

import reshard
from reshard.core.errors import ReshardError
from reshard.digests.result import Digest
from reshard.engines.checksums import checksums_of
from reshard.engines.digest import digest_of_answers, digest_of_engine
from reshard.engines.vllm.live import VllmModel
from reshard.engines.workers.digest_methods import DigestMethods
from reshard.refit import Link, RefitGroup, connect
from reshard.trainers import FsdpModel, MegatronModel
from tests.on_cpu.fsdp_on_cpu import everything, sharded
from tests.on_cpu.refit_on_cpu import engine_of
from tests.tools.mortal_worker import own_checksums
from tests.tools.refit_sides import trainer


def text_or_error(digest) -> str:
    """The text of a digest, or the sentence of the ReshardError that it raises."""
    try:
        return digest()
    except ReshardError as error:
        return str(error)


PP = "--pipeline-model-parallel-size"


class Workers(DigestMethods):
    """A rank's worker, and the engine of all of them as `reshard.digest` calls it; answers are JSON, as a server's."""

    def __init__(self, side: VllmModel) -> None:
        self.side = side

    def _reshard_engine_side(self) -> VllmModel:
        return self.side

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        answers: list = [None] * dist.get_world_size()
        dist.all_gather_object(answers, json.dumps(getattr(self, method)(*args)))
        return [json.loads(answer) for answer in answers]


def of_megatron_and_vllm(rank: int, flags: list[str], hf: str, mcore: str, engine: dict, wide: bool) -> dict:
    """The digests of a trainer, and of an engine that has loaded the same weights; then of each when one rank's memory
    has another number, and of the engine while it holds none of a version."""
    models, _ = trainer(flags, mcore, wide=wide)
    options = {"hf_config": hf, "dtype": "bf16" if wide else None}
    said = {"trainer": reshard.digest(models, **options)}
    if wide:
        said["as held"] = reshard.digest(models, hf_config=hf)
    module, config = engine_of(hf, **engine)
    side = VllmModel(module, config)
    workers = Workers(side)
    said["engine"] = reshard.digest(workers, dtype="bf16")
    assert digest_of_engine(workers, "bf16").tensors == said["engine"].tensors
    said["checksums"] = [checksums_of(side, module, path) == own_checksums(module) for path in (hf, mcore)]
    parameter = max((p for model in models for p in model.parameters()), key=torch.Tensor.numel)
    if rank == dist.get_world_size() - 1:
        parameter.data.view(-1)[0] += 1
    said["trainer, changed"] = text_or_error(lambda: reshard.digest(models, **options).text)
    if rank == 0:
        next(iter(side.regions.values())).tensor.data.view(-1)[:1] += 1
    said["engine, changed"] = text_or_error(lambda: reshard.digest(workers, dtype="bf16").text)
    said["checksums, changed"] = checksums_of(side, module, hf) == own_checksums(module)
    side.begin()
    said["half"] = text_or_error(lambda: reshard.digest(workers).text)
    part = {"tensors": {}, "parts": [], "version": 3}
    said["versions"] = text_or_error(
        lambda: digest_of_answers([part, part | {"version": 4}], None, "it").text
    )
    said["silent"] = text_or_error(lambda: digest_of_answers([part, None], None, "it").text)
    said["options"] = text_or_error(lambda: reshard.digest(workers, hf_config=hf).text)
    return {name: [one.text, one.tensors] if isinstance(one, Digest) else one
            for name, one in said.items()}  # fmt: skip


def of_refit(
    link: Link, workers: Workers, trainers_digest: Callable[[], Digest], replica: torch.Tensor | None
) -> dict:
    """What a verified refit says its digest is, beside those of both sides; what the link says of it afterward, also
    once the first rank's engine has another number; and what a refit says that is not verified, and one whose trainer
    has another number in the `replica` of its last rank, if that is given."""
    said: dict = {"report": link.refit(1, verify=True).digest}
    said |= {"trainer": trainers_digest().text, "engine": reshard.digest(workers, dtype="bf16").text}
    said["described"] = link.describe()["digest"]
    dist.barrier()
    if dist.get_rank() == 0:
        next(iter(workers.side.regions.values())).tensor.data.view(-1)[:1] += 1
    said["changed"] = text_or_error(lambda: reshard.digest(workers, dtype="bf16").text)
    said["described, changed"] = link.describe()["digest"]
    said["not verified"] = [link.refit(2).digest, link.describe()["digest"]]
    said["verified again"] = link.refit(3, verify=True).digest
    if replica is not None:
        if dist.get_rank() == dist.get_world_size() - 1:
            replica.data.view(-1)[:1] += 1
        said["replicas"] = text_or_error(lambda: str(link.refit(4, verify=True).digest))
    return said


def of_refit_from_megatron(
    rank: int, flags: list[str], hf: str, mcore: str, engine: dict, wide: bool
) -> dict:
    """The digests of a refit from Megatron (`of_refit`); replicas of a norm differ in the end."""
    models, _ = trainer(flags, mcore, wide=wide)
    side = VllmModel(*engine_of(hf, load_format="dummy", **engine))
    link = connect(RefitGroup.of_process_group(), MegatronModel(models), side)
    names = [(name, p) for model in models for name, p in model.named_parameters()]
    replica = None if PP in flags else next(p for name, p in names if name.endswith("final_layernorm.weight"))
    dtype = "bf16" if wide else None
    return of_refit(link, Workers(side), lambda: reshard.digest(models, hf_config=hf, dtype=dtype), replica)


def of_refit_from_fsdp(rank: int, mesh: dict[str, int], hf: str, engine: dict) -> dict:
    """The digests of a refit from a model in fp32 under FSDP2 (`of_refit`)."""
    model = FsdpModel(sharded(hf, mesh, torch.float32))
    side = VllmModel(*engine_of(hf, load_format="dummy", **engine))
    link = connect(RefitGroup.of_process_group(), model, side)
    return of_refit(link, Workers(side), lambda: reshard.digest(model, hf_config=hf, dtype="bf16"), None)


def of_vllm_in_blocks(rank: int, hf: str, engine: dict) -> dict:
    """The digest of an engine that has loaded a checkpoint in fp8 blocks; with one scale changed on one rank; and the
    sentence where it is asked for in bf16."""
    module, config = engine_of(hf, **engine)
    side = VllmModel(module, config)
    workers = Workers(side)
    whole = reshard.digest(workers)
    in_bf16 = text_or_error(lambda: reshard.digest(workers, dtype="bf16").text)
    if rank == 0:
        scales = next(iter(side.scales.values())).region.tensor
        scales.data.view(-1)[:1] *= 2
    changed = reshard.digest(workers)
    return {
        "whole": whole.text,
        "notices": whole.notices,
        "in bf16": in_bf16,
        "changed": [
            changed.text,
            sorted(n for n, number in changed.tensors.items() if whole.tensors[n] != number),
        ],
    }


def of_fsdp(rank: int, mesh: dict[str, int], hf: str) -> dict:
    """The digests of a model in fp32, as bf16 and as it is; and of one whose last rank has another number."""
    model = FsdpModel(sharded(hf, mesh, torch.float32))
    said = {
        "bf16": reshard.digest(model, hf_config=hf, dtype="bf16"),
        "fp32": reshard.digest(model, hf_config=hf),
    }
    said = {name: [one.text, one.tensors] for name, one in said.items()}
    if rank == dist.get_world_size() - 1:
        tensor = everything(model.model)[0][1]
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data.view(-1)[:1] += 1
    said["changed"] = text_or_error(lambda: reshard.digest(model, hf_config=hf, dtype="bf16").text)
    said["nameless"] = text_or_error(lambda: reshard.digest(model).text)
    return said
