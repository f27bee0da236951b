"""Refits on the CPU: real Megatron models into vLLM's real model classes, several processes, the
code path of the GPUs.

With ``RESHARD_TEST_DEVICE=cuda`` the models are moved to a GPU, all ranks to the same one, once
they are built: what is run then are its kernels and the mapping of other processes' memory.
"""

from dataclasses import replace

import torch

from reshard.engines.layout import place
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.layers import has_experts
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.quantized import layers, reload
from reshard.lora.parameters import linear_layers
from reshard.lora.scale import Scale
from reshard.megatron.parameters import expand
from reshard.refit import connect, sender
from reshard.refit.cuts import no_cuts
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import vllm_on_cpu
from tests.starting.ranks import caught
from tests.tools.refit_sides import (
    DEVICE,
    bits_of,
    fingerprint,
    held_by,
    on_the_cpu,
    place_in_engine,
    refit_in_turn,
    start,
    trainer,
)

ENGINE = VllmModel


def engine_of(directory: str, **options) -> tuple[torch.nn.Module, object]:
    """What `vllm_on_cpu.build` gives, where a refit is to find it."""
    with on_the_cpu():
        module, config = vllm_on_cpu.build(directory, **options)
    return module.to(DEVICE), config


def loaded(directory: str, **options) -> dict[str, tuple]:
    """The `fingerprint` of what vLLM's own loader makes of a directory."""
    with on_the_cpu():
        return fingerprint(vllm_on_cpu.build(directory, **options)[0])


def run_model(engine: VllmModel) -> None:
    """Run an engine's model, as far as its guard lets it."""
    engine.module(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def refit_twice(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refit from each of two Megatron checkpoints in turn.

    The engine starts with random weights; see `refit_sides.refit_in_turn`. `traced` takes the vLLM
    names out of the tables; `published` are the directories that vLLM's own loader is to load, if
    not those. With `nested` published names have a prefix, and vLLM's another one, as in models that
    also read images. With `round_bytes` what vLLM quantizes itself comes in rounds of so many;
    `unknown` forgets the kernels of which we know how they serve from fp8 blocks. With `engines` in `sides` there are
    several vLLMs, each with its options; `uncut` leaves what they want as it is.
    """
    if sides.get("uncut"):
        sender.cuts_among = lambda *_: no_cuts()
    if "engines" in sides and rank >= sides["trainer"]:
        engine = engine | sides["engines"][place_in_engine(rank, sides)[0]]
    reload.ROUND_BYTES = options.pop("round_bytes", reload.ROUND_BYTES)
    if options.pop("unknown", False):
        layers.BLOCK_KERNELS = layers.BLOCK_BACKENDS = ()
    traced, published = options.pop("traced", False), options.pop("published", None)
    if traced:
        without_vllm_names()
    nested = nest_names() if options.pop("nested", False) else None

    def make_engine() -> VllmModel:
        model, config = engine_of(checkpoints[0][0], **{"load_format": "dummy"} | engine)
        destination = VllmModel(model if nested is None else nested(model), config)
        if not traced and nested is None:
            by_rules = place(VLLM, destination.model, destination.rank)
            assert held_by(destination.placement) == held_by(by_rules), "not by the table, but by the trace"
        return destination

    def load_by_vllm() -> list[dict[str, tuple]]:
        made = [loaded(hf, **engine) for hf in published or [hf for hf, _ in checkpoints]]
        if nested is None:
            return made
        return [{f"language_model.{name}": bits for name, bits in one.items()} for one in made]

    return refit_in_turn(rank, sides, flags, checkpoints, make_engine, load_by_vllm, **options)


def rows_exchanged(rank: int, sides: dict, directory: str, exchanges: list[tuple[str, str]]):
    """What becomes of the tensors of a vLLM, and what is said of one into which rows of the family's table
    that were exchanged are to go."""
    start(rank, sides)
    module, config = engine_of(directory, load_format="dummy")
    destination = VllmModel(module, config)
    family = destination.model.family
    rows = family.rows["layer"]
    said = []
    for names in exchanges:
        one, other = (next(row for row in rows if row.megatron == name) for name in names)
        hf = {one: other.hf, other: one.hf}
        family.rows["layer"] = tuple(replace(row, hf=hf.get(row, row.hf)) for row in rows)
        said.append(caught(lambda: VllmModel(module, config)))
    return {name: account.what for name, account in destination.accounts.items()}, said


def refit_as_held(rank: int, *arguments):
    """`refit_twice` from a trainer whose numbers are taken to be the published ones, as a negative
    control."""
    MegatronModel.as_published = lambda self, model: self
    return refit_twice(rank, *arguments)


def below_adapters(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What an engine holds that vLLM has wrapped for LoRA adapters, after a refit, by the names
    that its layers had before; what one holds that has loaded the checkpoint; how many layers are
    wrapped; whether all wrappers are where they were; what is said of adapters of all linear layers,
    and of all but one; and whether each has a place."""
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
    linear = [weight for layer in linear_layers(expand(destination.model)) for weight in layer.weights]
    scales = {part.name: Scale(4, 8) for weight in linear for part in weight.parts}
    adapter = destination.adapter("policy")
    told = [caught(lambda: adapter.take_scales(scales))]
    scales = {name: scale for name, scale in scales.items() if "kv_b_proj" not in name}
    told.append(caught(lambda: adapter.take_scales(scales)))
    covered = all(name in adapter.targets or ".mlp.gate." in name or "layers.4." in name for name in scales)
    same = wrapped == [(name, id(one)) for name, one in module.named_modules()]
    return held, loaded(checkpoint[0], **how), len(layers_with), same, told, covered


def connecting(
    rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict, **options
):
    """What each member says at connect."""
    is_trainer, is_engine, members = start(rank, sides)
    source = MegatronModel(trainer(flags, checkpoint[1])[0]) if is_trainer else None
    build = lambda: VllmModel(*engine_of(checkpoint[0], load_format="dummy", **engine))  # noqa: E731
    return caught(lambda: connect(members, source, build() if is_engine else None, **options))


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
    called `extra`, or whose layers say that they place experts by load (``eplb``); and whether it is fit."""
    from reshard.models.family import families

    start(rank, sides)
    for family in families().values():
        kept = [row for row in family.rows["layer"] if not row.hf.startswith(tuple(rows))]
        family.rows["layer"] = tuple(kept)
    if traced:
        without_vllm_names()
    module, config = engine_of(directory, load_format="dummy", **engine)
    if extra == "eplb":  # which vLLM itself starts on GPUs alone
        for layer in filter(has_experts, module.modules()):
            layer.moe_config.moe_parallel_config.enable_eplb = True
    elif extra:
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
