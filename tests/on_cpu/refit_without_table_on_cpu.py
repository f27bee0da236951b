"""Refits on the CPU from real transformers models under ``fully_shard``, of classes that no mapping table covers, into
the real model classes of vLLM or, in its environment, of SGLang."""

import gc
import json
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.refit import connect
from reshard.trainers import FsdpModel
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start

SGLANG_FILES = {
    "Gemma3ForCausalLM": "gemma3_causal", "GraniteForCausalLM": "granite", "Olmo2ForCausalLM": "olmo2",
    "StableLmForCausalLM": "stablelm", "GraniteMoeForCausalLM": "granitemoe",
    "Glm4ForCausalLM": "glm4", "Gemma3ForConditionalGeneration": "gemma3_mm",
}  # fmt: skip


def class_of(directory: str) -> str:
    """The class that a directory names."""
    [name] = json.loads((Path(directory) / "config.json").read_text())["architectures"]
    return name


def sharded(directory: str, shard: int) -> torch.nn.Module:
    """The model of a directory, of the class that it names, on a mesh."""
    model = getattr(transformers, class_of(directory)).from_pretrained(directory, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (shard,), mesh_dim_names=("shard",))
    decoder = model.get_decoder()
    for layer in (decoder if hasattr(decoder, "layers") else model.model).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def into_vllm(directory: str, **options):
    from tests.on_cpu import vllm_on_cpu
    from tests.tools import vllm_models

    vllm_models.register(class_of(directory))
    return vllm_on_cpu.build(directory, **options)


def into_sglang(directory: str, **options):
    from tests.on_cpu import sglang_on_cpu

    sglang_on_cpu.MODELS = (*sglang_on_cpu.MODELS, *SGLANG_FILES.values())
    sglang_on_cpu.only_our_models()
    return sglang_on_cpu.build(directory, **options)


def engine_of():
    """What builds a model of the engine of this environment, and our class of it."""
    if find_spec("vllm") is None:
        from reshard.engines.sglang.live import SglangModel

        return into_sglang, SglangModel
    from reshard.engines import VllmModel

    return into_vllm, VllmModel


def refit_each(
    rank: int, sides: dict, cases: dict[str, tuple[list[str], dict]]
) -> dict[str, tuple | str | None]:
    """For each class, of two checkpoints and the engine's options: what the engine's ranks hold after a refit from the
    second, what its own loader makes of either, and the tensors that were left alone; or what is said everywhere where
    it is refused."""
    is_trainer, is_engine, members = start(rank, sides)
    build, engine = engine_of()
    results: dict[str, tuple | str | None] = {}
    for name, (checkpoints, options) in cases.items():

        def source(directory: str = checkpoints[1]) -> FsdpModel:
            return FsdpModel(sharded(directory, sides["trainer"]))

        def destination(directory: str = checkpoints[0], options: dict = options):
            return engine(*build(directory, load_format="dummy", **options))

        links: list = []

        def join(source=source, destination=destination, links: list = links) -> None:
            links.append(connect(members, source if is_trainer else None, destination if is_engine else None))

        refused = caught(join)
        results[name] = refused if not links else None
        if not links:
            continue
        [link] = links
        link.refit(verify=True)
        if is_engine:
            made = link.receiver.engine
            expected = [fingerprint(build(hf, **options)[0]) for hf in checkpoints]
            left = [entry["how"] for entry in made.tensor_accounts() if entry["what"] == "left alone"]
            results[name] = fingerprint(made.module), expected, left
            del made
        del link, links
        gc.collect()
    return results


def refusals(rank: int, sides: dict, checkpoint: str) -> dict[str, str]:
    """What every rank says at connect of a model that the engine would serve otherwise, by what is changed."""
    is_trainer, is_engine, members = start(rank, sides)
    build, engine = engine_of()

    def said(change_trainer=lambda model: None, change_engine=lambda module: None, **options) -> str:
        def source() -> FsdpModel:
            model = sharded(checkpoint, sides["trainer"])
            change_trainer(model)
            return FsdpModel(model)

        def destination():
            module, config = build(checkpoint, load_format="dummy", **options)
            change_engine(module)
            return engine(module, config)

        return caught(
            lambda: connect(members, source if is_trainer else None, destination if is_engine else None)
        )

    def skip(module: torch.nn.Module) -> None:
        load = module.load_weights
        module.load_weights = lambda weights: load(w for w in weights if "layers.1.mlp.down_proj" not in w[0])

    def one_more(module: torch.nn.Module) -> None:
        module.register_buffer("of_nobody", torch.ones(4))

    def scaled(model: torch.nn.Module) -> None:
        model.config.query_pre_attn_scalar = 7

    def another(model: torch.nn.Module) -> None:
        model.model.register_parameter("adapter", torch.nn.Parameter(torch.zeros(4, 4)))

    return {
        "fits": said(),
        "a name that the loader skips": said(change_engine=skip),
        "a buffer that nobody brings": said(change_engine=one_more),
        "another config": said(scaled),
        "a parameter that the class does not have": said(another),
        "stages": said(pp=2),
    }
