"""Refits into engines that make something else of the weights that arrive, as `refit_on_cpu` runs
them: quantized layers, absorbed matrices of MLA, blocks of fp8."""

import zlib
from functools import partial

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm import live
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.quantized import processing, reload, reprocessing
from reshard.engines.workers.deltas import EngineDeltas
from reshard.refit import connect
from reshard.refit.copying import copies
from reshard.refit.copying.tables import DST
from reshard.refit.reporting.served_parts import digest_parts
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import vllm_on_cpu
from tests.on_cpu.refit_on_cpu import engine_of, loaded
from tests.starting.ranks import caught
from tests.tools.refit_sides import fingerprint, start, trainer


def reloads_that_differ(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict):
    """What a verified refit into an engine that quantizes itself says: as it is; where a scale, or
    a code, changes after it has arrived; where vLLM's processing fails, and where it leaves another
    number beside the weights; where a check ends in its middle; and at last as it is. And whether
    the layers and their kernels are the objects that they were, and what is said of them. Of a
    trainer in another process, what each refit says."""
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
        return sorted(
            id(one)
            for some in destination.reloads.round_of
            for owner in processing.processing_objects(module.get_submodule(some))
            for one in (owner, *vars(owner).values(), *getattr(owner, "_parameters", {}).values())
        )

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
    process = processing.process

    def fails(*of):
        process(*of)
        raise RuntimeError("out of memory")

    def counts(*of):
        process(*of)
        if of[0] is layer:
            layer.factor *= 2

    for other in (fails, counts):
        reprocessing.process = other
        found.append((said(), destination.ready, objects() == before))
    reprocessing.process = process
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
    """An engine that has loaded the first of these compressed checkpoints, refitted, from a
    checkpoint of other weights: what it holds, what engines hold that have loaded the others, what
    is said of it, whether a new look at it that a refit has spoiled finds the scales of its inputs,
    and what is said of one that has loaded nothing; whether what its kernels keep of scales is
    there after its memory was discarded, and what it holds after another refit since it has loaded
    the third one, where vLLM `reloads` such checkpoints."""
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
        for tensor in processing.scales_in(
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
    """Let MLA put new matrices in the places of those that it has made of ``kv_b_proj``, as vLLM
    0.24 and 0.25 do."""
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
    """What lies after each of two refits where MLA's matrices lay when the engine was started,
    where CUDA graphs read them; what engines make that have loaded those checkpoints; how many
    matrices there are; and what a verified refit says where one of them changes afterward, and
    then."""
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
    """What each rank says of a refit where the first one's part of a weight holds such a number,
    and of the next, without it; and whether the engine is fit after each."""
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
    """What each rank says of a refit in which vLLM's processing fails on the first one alone, which
    has scales to find with the others; of the next one; whether the engine is fit after each; and
    of verified ones in which a code, and a scale, of its first layer changes there."""
    reload.ROUND_BYTES = 1
    _, _, members = start(rank, sides)
    module, config = engine_of(checkpoint[0], load_format="dummy", **engine)
    destination = VllmModel(module, config)
    link = connect(members, MegatronModel(trainer(flags, checkpoint[1])[0]), destination)
    layer = module.get_submodule(next(iter(destination.reloads.round_of)))
    process, update_derived, found = processing.process, destination.update_derived, []

    def fails(*of):
        if of[0] is layer:
            raise RuntimeError("out of memory")
        process(*of)

    def refitted() -> None:
        found.append((caught(lambda: link.refit(verify=True)), destination.ready))

    if not rank:
        reprocessing.process = fails
    refitted()
    reprocessing.process = process
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
    """What each member says of verified refits into fp8 blocks: as it is, where a code, or a scale,
    changes after it has arrived, where parts of blocks that several ranks have do not arrive, if
    there are any, and at last as it is; and the engine's of scales that vLLM has made up, and at
    connect where ours are made in another way than vLLM's."""
    from reshard.engines.vllm.quantized import fp8
    from reshard.quantization import fp8_blocks

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
    fp8_blocks.SMALLEST = 1e-3
    said.append(caught(lambda: VllmModel(module, config)))
    return said


def all_but(memory: torch.Tensor, copy, table) -> None:
    """Copy what does not go into this memory."""
    into = table[:, DST] - memory.data_ptr()
    copy(table[(into < 0) | (into >= len(memory))])


def arranged(rank: int, sides: dict, flags: list[str], checkpoint: tuple[str, str], engine: dict, how: str):
    """After a verified refit into an engine that arranges experts for a kernel: the names of what is not what vLLM's
    own loader makes of the checkpoint, or is where an engine for other kernels has it; what is said of the layers; and
    what a digest and a delta of a chain say. `how` says that gate and up are left where they are loaded, or that we do
    not know how vLLM calls what exchanges them."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    _, _, members = start(rank, sides)
    expected, plain = (
        loaded(checkpoint[0], **engine),
        loaded(checkpoint[0], **engine | {"moe_backend": "auto"}),
    )
    if how == "left":
        live.exchange = lambda placed, layers: placed
        shuffle = unquantized.convert_moe_weights_to_flashinfer_trtllm_block_layout

        def shuffled(cache, w13, w2, **options):
            # In place, as vLLM 0.32 reads its outcome; older ones take what is returned.
            return shuffle(cache, w13.copy_(w13.roll(w13.shape[1] // 2, 1)), w2, **options)

        unquantized.convert_moe_weights_to_flashinfer_trtllm_block_layout = shuffled
    if how == "unknown":
        unquantized.convert_to_unquantized_kernel_format = lambda layer: None
    module, config = engine_of(checkpoint[0], load_format="dummy", **engine)
    destination = VllmModel(module, config)
    link = connect(members, MegatronModel(trainer(flags, checkpoint[1])[0]), destination)
    link.refit(verify=True)
    held = fingerprint(module)
    wrong, moved = ({name for name in held if held[name] != other[name]} for other in (expected, plain))
    said = caught(lambda: digest_parts(destination)), caught(lambda: EngineDeltas(destination))
    return wrong, moved, link.describe()["quantized"], said


def sinks_of_flashinfer(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], noted: bool
):
    """What the attention of an engine by FlashInfer reads as sinks after a verified refit from each checkpoint, and
    what that of one reads that has loaded it; whether they stayed in their place; and what a check says where they are
    those of before. Of a vLLM that has not `noted` what they are a copy of, what is said at connect."""
    backend = "vllm.v1.attention.backends.flashinfer.FlashInferBackend"
    vllm_on_cpu.Host.get_attn_backend_cls = classmethod(lambda cls, *_, **__: backend)
    _, _, members = start(rank, sides)

    def read(module) -> list[torch.Tensor]:
        runs = [one.impl for one in module.modules() if hasattr(one, "impl")]
        assert len(runs) == 4 and all(run.sinks.dtype == torch.float32 for run in runs)
        return [run.sinks for run in runs]

    module, config = engine_of(checkpoints[0][0], load_format="dummy")
    if not noted:
        next(one.impl for one in module.modules() if hasattr(one, "impl"))._sinks_source = None
        return caught(lambda: VllmModel(module, config))
    places = [one.data_ptr() for one in read(module)]
    chunks, load = trainer(flags, checkpoints[0][1])
    destination = VllmModel(module, config)
    link, found = connect(members, MegatronModel(chunks), destination), []
    for number, (hf, mcore) in enumerate(checkpoints):
        if number:
            load(mcore)
        link.refit(verify=True)
        found.append(
            ([one.tolist() for one in read(module)], [one.tolist() for one in read(engine_of(hf)[0])])
        )
    stayed = places == [one.data_ptr() for one in read(module)]
    destination.update_derived = lambda: read(module)[1].add_(1)
    return found, stayed, caught(lambda: link.refit(verify=True))


def arranged_otherwise(rank: int, sides: dict, cases: list[tuple[str, dict, str, str]]) -> list[str]:
    """What is said at connect of engines of these directories and options, of which a layer is said to be run by a
    kernel: the end of the layer's name, and the kernel's."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    start(rank, sides)
    said = []
    for directory, engine, end, kernel in cases:
        module, config = engine_of(directory, load_format="dummy", **engine)
        for name, layer in module.named_modules():
            if end and name.endswith(end) and end.endswith("experts"):
                layer.quant_method.fp8_backend = Fp8MoeBackend[kernel]
            elif end and name.endswith(end):
                layer.quant_method.fp8_linear = type(kernel, (), {})()
        said.append(caught(lambda: VllmModel(module, config)))  # noqa: B023
    return said


def arranged_below_adapters(rank: int, sides: dict, directory: str) -> str:
    """What is said at connect of an engine whose experts are shuffled for a kernel that adds adapters to them."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    start(rank, sides)
    chosen = UnquantizedMoeBackend.FLASHINFER_TRTLLM, TrtLlmBf16LoRAExperts
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda *_, **__: chosen
    module, config = engine_of(directory, load_format="dummy", enable_lora=True, max_lora_rank=8)
    return caught(lambda: VllmModel(vllm_on_cpu.wrap_for_adapters(module, config), config))
