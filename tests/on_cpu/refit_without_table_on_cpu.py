"""Refits on the CPU from real transformers models under ``fully_shard``, of classes that no mapping table covers, into
the real model classes of vLLM or, in its environment, of SGLang."""

import gc
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard import DeltaWriter
from reshard.delta import apply_deltas
from reshard.live.digest import digest_of_models
from reshard.refit import Link, connect
from reshard.refit.reporting.served_parts import digest_parts
from reshard.trainers import FsdpModel
from tests.on_cpu.fsdp_on_cpu import copy_shards
from tests.starting.ranks import caught
from tests.tools.chains import Workers
from tests.tools.model_classes import class_of
from tests.tools.refit_sides import fingerprint, start

# Of a model that transformers has a class of another name for than the published one.
OWN_CLASSES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}


def sharded(directory: str, shard: int) -> torch.nn.Module:
    """The model of a directory, of the class that it names, on a mesh."""
    return on_mesh(directory, {"shard": shard})


def on_mesh(directory: str, sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The same on a mesh of these sizes, in a dtype."""
    name = class_of(directory)
    model = getattr(transformers, OWN_CLASSES.get(name, name)).from_pretrained(directory, dtype=dtype)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    decoder = model.get_decoder()
    within = decoder if hasattr(decoder, "layers") or hasattr(decoder, "h") else model.model
    if hasattr(within, "H_module"):  # HRM-Text has two stacks
        layers = [*within.H_module.layers, *within.L_module.layers]
    else:
        layers = [*(within.h if hasattr(within, "h") else within.layers)]
    for layer in layers:
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
    from tests.tools import sglang_models

    sglang_models.register(class_of(directory))
    return sglang_on_cpu.build(directory, **options)


def engine_of():
    """What builds a model of the engine of this environment, and our class of it."""
    if find_spec("sglang") is not None:  # vLLM is there, too
        from reshard.engines.sglang.live import SglangModel

        return into_sglang, SglangModel
    from reshard.engines import VllmModel

    return into_vllm, VllmModel


def image_cache():
    """SGLang's module that keeps what a tower has made of images."""
    newer, older = (f"sglang.srt.managers.{name}" for name in ("mm_schedule", "mm_utils"))
    return import_module(newer if find_spec(newer) is not None else older)


def see_image() -> None:
    """Let SGLang keep what a tower has made of one image."""
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    cache = image_cache()
    cache.init_mm_embedding_cache(1 << 20)
    cache.embedding_cache.set(7, EmbeddingResult(embedding=torch.ones(4)))
    assert images() == [7]


def images() -> list:
    """The images of which SGLang has kept something."""
    return [*image_cache().embedding_cache.mm_cache]


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
        may_see = build is into_sglang and class_of(checkpoints[0]) != "GptOssForCausalLM"
        if may_see and is_engine:
            see_image()
        link.refit(verify=True)
        if is_engine:
            assert not may_see or not images()
            made = link.receiver.engine
            expected = [fingerprint(build(hf, **options)[0]) for hf in checkpoints]
            left = [entry["how"] for entry in made.tensor_accounts() if entry["what"] == "left alone"]
            results[name] = fingerprint(made.module), expected, left
            del made
        del link, links
        gc.collect()
    return results


def refit_exchanged(rank: int, sides: dict, cases: dict[str, tuple[str, list[str]]]) -> dict[str, list[str]]:
    """For each class, of a checkpoint and two parameters of one shape: which of an engine's tensors are not what its
    own loader makes of the checkpoint, after a refit from a trainer of it that has exchanged the two."""
    members = start(rank, sides)[2]
    build, engine = engine_of()
    wrong = {}
    for name, (directory, exchanged) in cases.items():
        model = sharded(directory, sides["trainer"])
        one, other = (dict(model.named_parameters())[parameter].to_local() for parameter in exchanged)
        with torch.no_grad():
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        made = engine(*build(directory, load_format="dummy", tp=2))
        connect(members, FsdpModel(model), made).refit(verify=True)
        expected = fingerprint(build(directory, tp=2)[0])
        now = fingerprint(made.module)
        wrong[name] = [key for key in expected if now[key] != expected[key]]
    return wrong


def without_tower(directory: str, shard: int) -> torch.nn.Module:
    """The same, of a trainer that has dropped the tower."""
    model = sharded(directory, shard)
    del model.model.visual
    return model


def beside_towers(rank: int, sides: dict, checkpoints: list[str], options: dict) -> dict:
    """Of two checkpoints: what an engine that has loaded the first holds after a refit from the second without its
    tower, and from all of it, and what its own loader makes of either; what is said where it has dummy weights; and
    what it remembers of images after each, and of how many of the tower's tensors its digest says that they do not
    count."""
    build, engine = engine_of()
    members = start(rank, sides)[2]
    remembered: list = []
    not_counted: list[int] = []

    def refitted(source, **load_format: str) -> dict[str, tuple] | str:
        made = engine(*build(checkpoints[0], **options | load_format))
        trainer, links = FsdpModel(source(checkpoints[1], sides["trainer"])), list[Link]()
        refused = caught(lambda: links.append(connect(members, trainer, made)))
        if not links:
            return refused
        if build is into_sglang:
            see_image()
        links[0].refit(verify=True)
        remembered.append(images() if build is into_sglang else [])
        not_counted.append(digest_parts(made)["tower"])
        return fingerprint(made.module)

    return {
        "without": refitted(without_tower),
        "dummy": refitted(without_tower, load_format="dummy"),
        "all": refitted(sharded),
        "loaded": [fingerprint(build(hf, **options)[0]) for hf in checkpoints],
        "images": remembered,
        "not counted": not_counted,
    }


def write_whole(rank: int, sides: dict, checkpoints: list[str], chain: str) -> dict[str, str]:
    """Add the second of two checkpoints to a chain that begins with the first; the digest of the trainer then, and what
    is said of one that has dropped a tensor of its tower."""
    members = start(rank, sides)[2]  # kept until the other rank has joined them
    model, other = (sharded(directory, sides["trainer"]) for directory in checkpoints)
    writer = DeltaWriter(FsdpModel(model), checkpoints[0], chain)
    with torch.no_grad():
        for parts in (torch.nn.Module.parameters, torch.nn.Module.buffers):
            for held, value in zip(parts(model), parts(other), strict=True):
                held.copy_(value)
    writer.save()
    digested = digest_of_models(FsdpModel(model), checkpoints[0])
    tower = next(
        module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower"))
    )
    [norm, *_] = [module for name, module in tower.named_modules() if name.endswith("norm1")]
    [*_, last] = dict(norm.named_parameters())
    norm.register_parameter(last, None)
    lacking = caught(lambda: digest_of_models(FsdpModel(model), checkpoints[0]))
    members.close()
    return {"digest": digested.text, "a part of a tower": lacking}


def follow(rank: int, sides: dict, cases: dict[str, tuple[list[str], str]]) -> dict[str, dict]:
    """Add the second of two checkpoints of each class to a chain that begins with the first, and follow that with an
    engine that has loaded the first: the trainer's digest, what the engine holds before and after, and what its loader
    makes of the second. And what is said of a trainer that has whole numbers in another dtype."""
    members, outcome = start(rank, sides)[2], {}  # kept until the other rank has joined them
    build, engine_class = engine_of()
    # First, since vLLM changes transformers' classes where it serves a model by them.
    models = {name: [on_mesh(directory, {"shard": 2}) for directory in of] for name, (of, _) in cases.items()}
    for name, ((first, second), chain) in cases.items():
        model, other = models[name]
        writer = DeltaWriter(FsdpModel(model), first, chain)
        copy_shards(other, model)
        writer.save()
        engine = engine_class(*build(first, tp=2))
        before = fingerprint(engine.module)
        workers = Workers(engine)
        assert apply_deltas(workers, chain, verify=True) == 1
        after = fingerprint(engine.module)
        said = {
            "trainer": digest_of_models(FsdpModel(model), first).text,
            "before": before,
            "after": after,
            "expected": fingerprint(build(second, tp=2)[0]),
        }
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm1d):
                module.num_batches_tracked = module.num_batches_tracked.int()
        said["in another dtype"] = caught(
            lambda model=model, first=first: digest_of_models(FsdpModel(model), first)
        )
        outcome[name] = said
    members.close()
    return outcome


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

    def without_norm(module: torch.nn.Module) -> None:
        """As of a class that has no such tensor, and whose loader passes over its name."""
        load = module.load_weights
        name = "layers.1.post_feedforward_layernorm"
        module.load_weights = lambda weights: load(w for w in weights if name not in w[0])
        for path, child in module.named_modules():
            if path.endswith(name):
                child.register_parameter("weight", None)

    def one_more(module: torch.nn.Module) -> None:
        module.register_buffer("of_nobody", torch.ones(4))

    def of_all_weights(module: torch.nn.Module) -> None:
        module.process_weights_after_loading = lambda: None

    def made_up(module: torch.nn.Module) -> None:
        next(one for one in module.modules() if hasattr(one, "_k_scale"))._k_scale.fill_(0.5)

    def scaled(model: torch.nn.Module) -> None:
        model.config.query_pre_attn_scalar = 7

    def another(model: torch.nn.Module) -> None:
        model.model.register_parameter("adapter", torch.nn.Parameter(torch.zeros(4, 4)))

    return {
        "fits": said(),
        "fits with a cache in fp8": said(kv_cache_dtype="fp8"),
        "scales of a cache": said(change_engine=made_up, kv_cache_dtype="fp8"),
        "a name that the loader skips": said(change_engine=skip),
        "a buffer that nobody brings": said(change_engine=one_more),
        "what is computed of all weights": said(change_engine=of_all_weights),
        "another config": said(scaled),
        "a parameter that the class does not have": said(another),
        "stages fit": said(pp=2),
        "a stage that nobody fills": said(change_engine=skip, pp=2),
        "a name that every stage skips": said(change_engine=without_norm, pp=2),
        "another config of stages": said(scaled, pp=2),
    }


def tower_in_stages(rank: int, sides: dict, checkpoint: str) -> dict[str, str]:
    """What every rank says at connect of a larger model whose engine has stages that serve its tower otherwise, by what
    is changed; or "left alone", where the tower is."""
    members = start(rank, sides)[2]
    build, engine = engine_of()
    whole, text = (FsdpModel(make(checkpoint, sides["trainer"])) for make in (sharded, without_tower))
    norm = "visual.blocks.1.norm1.weight"

    def said(change=lambda module: None, stages: int = 2, trainer: FsdpModel = whole, **options) -> str:
        made: list = []

        def destination():
            module, config = build(checkpoint, pp=2, **{"load_format": "dummy"} | options)
            if rank >= 2 - stages:  # the last of them alone
                change(module)
            made.append(engine(module, config))
            return made[0]

        refused = caught(lambda: connect(members, trainer, destination))
        left = made and any("another part" in one["how"] for one in made[0].tensor_accounts())
        return "left alone" if left and refused == "no error" else refused

    def loads(module: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        load = module.load_weights
        taken = lambda weights: ((name, change(name, tensor)) for name, tensor in weights)  # noqa: E731
        module.load_weights = lambda weights: load(each for each in taken(weights) if each[1] is not None)

    def skip(module: torch.nn.Module) -> None:
        loads(module, lambda name, tensor: None if name == norm else tensor)

    def without_norm(module: torch.nn.Module) -> None:
        skip(module)
        module.get_submodule(norm.rpartition(".")[0]).register_parameter("weight", None)

    def text_alone(module: torch.nn.Module) -> None:
        loads(module, lambda name, tensor: None if name.startswith("visual.") else tensor)
        module.visual = torch.nn.Identity()

    def computed(module: torch.nn.Module) -> None:
        loads(module, lambda name, tensor: tensor * 2 if name == norm else tensor)

    return {
        "fits": said(),
        "a stage that lacks some of it": said(without_norm, 1),
        "a stage that has none of it": said(text_alone, 1),
        "a stage that nobody fills": said(skip, 1),
        "a name that every stage skips": said(without_norm),
        "no tower anywhere": said(text_alone),
        "no tower anywhere, of a language model": said(text_alone, trainer=text),
        "a stage that computes": said(computed, 1, load_format="safetensors"),
        "a stage that computes, of a language model": said(
            computed, 1, trainer=text, load_format="safetensors"
        ),
        "a stage that computes, with dummy weights": said(computed, 1, trainer=text),
    }
