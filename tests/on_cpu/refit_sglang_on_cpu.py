"""Refits on the CPU into SGLang's real model classes: as `refit_on_cpu`, for the other engine."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from reshard.engines.layout import place
from reshard.engines.sglang import compat
from reshard.engines.sglang.guard import check_run
from reshard.engines.sglang.live import SglangModel
from reshard.engines.sglang.weights.names import SGLANG
from tests.on_cpu import sglang_on_cpu
from tests.starting.ranks import caught
from tests.tools.refit_sides import bits_of, fingerprint, held_by, refit_in_turn


def run_routers(model: torch.nn.Module) -> torch.nn.Module:
    """Run GLM's routers once, as serving does: they keep a copy of their weights in fp32."""
    for module in model.modules():
        if hasattr(module, "_weight_fp32"):
            module(torch.zeros(1, module.weight.shape[1], dtype=module.weight.dtype))
    return model


def held(model: torch.nn.Module) -> dict[str, tuple]:
    """The fingerprint of a model, with the matrices that it keeps beside its parameters and buffers, and
    without indexers that it makes and never runs, which nothing loads."""
    attributes = {
        f"{path}.{key}": bits_of(getattr(module, key))
        for path, module in model.named_modules()
        for key in ("w_kc", "w_vc")
        if isinstance(getattr(module, key, None), torch.Tensor)
    }
    idle = tuple(f"{path}.indexer." for path, one in model.named_modules() if getattr(one, "skip_topk", None))
    return {
        name: bits for name, bits in (fingerprint(model) | attributes).items() if not name.startswith(idle)
    }


def built(directory: str, **options) -> tuple[torch.nn.Module, object]:
    """What `sglang_on_cpu.build` gives, as it is when it has served."""
    module, arguments = sglang_on_cpu.build(directory, **options)
    return run_routers(module), arguments


ENGINE, engine_of = SglangModel, built


def loaded(directory: str, **options) -> dict[str, tuple]:
    """The `fingerprint` of what SGLang's own loader makes of a directory."""
    return fingerprint(built(directory, **options)[0])


def run_model(engine: SglangModel) -> None:
    """Run an engine's model, as far as its guard lets it: the hook that SGLang calls in the place of a runner."""
    check_run(lambda runner: None, SimpleNamespace(model=engine.module))


def refit_twice(
    rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]], engine: dict, **options
):
    """Refit from each of two Megatron checkpoints in turn; see `refit_sides.refit_in_turn`. With
    `traced` some rank goes by the trace alone; `published` are the directories that SGLang's own loader
    is to load, if not those."""
    traced, published = options.pop("traced", False), options.pop("published", None)

    def make_engine() -> SglangModel:
        destination = SglangModel(*built(checkpoints[0][0], **{"load_format": "dummy"} | engine))
        by_rules = place(SGLANG, destination.model, destination.rank)
        assert traced or held_by(destination.placement) == held_by(by_rules), (
            "not by the table, but the trace"
        )
        return destination

    def load_by_sglang() -> list[dict[str, tuple]]:
        return [held(built(hf, **engine)[0]) for hf in published or [hf for hf, _ in checkpoints]]

    return refit_in_turn(rank, sides, flags, checkpoints, make_engine, load_by_sglang, look=held, **options)


def alone(folder: str) -> None:
    """Make a group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)


class Arguments:
    """An engine's ``ServerArgs``, as SGLang has resolved them, which a test may change."""

    _resolved_overrides = ()

    def __init__(self, arguments: object) -> None:
        self._arguments = compat.resolved(arguments)

    def __getattr__(self, name: str) -> object:
        return getattr(self._arguments, name)


# Of each layer's eight experts, the first two exchanged.
OTHER_ORDER = json.dumps({"physical_to_logical_map": [[1, 0, *range(2, 8)]] * 4})


def refusals(rank: int, folder: str, directories: dict[str, str], in_blocks: dict) -> dict[str, str]:
    """What is said at connect of models that SGLang serves in other ways, by what is changed; `in_blocks`
    is what it is told of one in fp8 blocks."""
    alone(folder)

    def said(variant: str, change=lambda model, arguments: None, **options) -> str:
        options = {"load_format": "dummy"} | options
        model, given = sglang_on_cpu.build(directories[variant], **options)
        arguments = Arguments(given)
        change(model, arguments)
        return caught(
            lambda: SglangModel(model, arguments).take_optional(frozenset())
        )  # of a trainer without a tower

    def runner(model: torch.nn.Module, _) -> None:
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerBackend

        for module in model.modules():
            if hasattr(module, "moe_runner_config") and hasattr(module, "quant_method"):
                module.quant_method.runner.runner_backend = MoeRunnerBackend("flashinfer_cutlass")

    def quantized(model: torch.nn.Module, _) -> None:
        from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8LinearMethod

        model.model.layers[0].self_attn.qkv_proj.quant_method = object.__new__(W8A8Fp8LinearMethod)

    def shared(model: torch.nn.Module, _) -> None:
        model.model.layers[1].mlp.experts.num_fused_shared_experts = 1

    def drafting(_, arguments) -> None:
        arguments.speculative_algorithm = "EAGLE"

    def kept(model: torch.nn.Module, _) -> None:
        model.model.layers[1]._derived_weight_cache_error = "Restart without it."

    def cached(_, arguments) -> None:
        arguments.weight_cache_mode = "client"

    def elastic(_, arguments) -> None:
        arguments.enable_eplb, arguments.elastic_ep_backend = True, "mooncake"

    def packed(model: torch.nn.Module, _) -> None:
        model.model.layers[0].mlp.down_proj.weight_scale_inv.format_ue8m0 = True

    def cache(_, arguments) -> None:
        arguments.kv_cache_dtype = "fp8_e4m3"

    def smaller(model: torch.nn.Module, _) -> None:
        model.model.layers[0].mlp.down_proj.quant_method.weight_block_size = [64, 64]

    def gate_and_up(model: torch.nn.Module, _) -> None:
        loader = model.load_weights
        swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        names = lambda name: ".".join(swapped.get(part, part) for part in name.split("."))  # noqa: E731
        model.load_weights = lambda weights: loader((names(name), tensor) for name, tensor in weights)

    return {
        "nothing": said("qwen3-moe"),
        "biases of MLPs": said("llama-bias"),
        "a dense layer": said("qwen3-moe-mixed"),
        "runner": said("qwen3-moe", runner),
        "quantized": said("qwen3", quantized),
        "shared experts": said("glm4-moe", shared),
        "drafting": said("qwen3", drafting),
        "weight cache": said("qwen3", cached),
        "copies": said("qwen3", kept),
        "ranks that come and go": said("qwen3-moe", elastic),
        "another copy of experts": said("qwen3-moe", ep_num_redundant_experts=2),
        "another order of experts": said("qwen3-moe", init_expert_location=OTHER_ORDER),
        "blocks": said("blocks", **in_blocks),
        "packed scales": said("blocks", packed, **in_blocks),
        "cache in fp8": said("blocks", cache, **in_blocks),
        "blocks of 64": said("blocks", smaller, **in_blocks),
        "a tower": said("kimi-k2.5"),
        "another loader": said("qwen3", gate_and_up),
    }


def derived(rank: int, folder: str, pairs: list[tuple[str, str]]) -> list[dict]:
    """The tensors that an engine of the first of two directories derives, which of them a check names before and
    after a weight that they are made of is changed, after they are derived anew, and after SGLang's own loader has
    loaded the second; and what is said of a cache of keys and values that is not flushed behind them,
    and whether the engine serves all the same."""
    alone(folder)
    results = []
    for directory, other in pairs:
        engine = SglangModel(*built(directory))
        result = {"all": sorted(engine.derived.tensors()), "before": engine.stale_derived()}
        for name, tensor in engine.module.named_parameters():
            if name.endswith(("layers.1.self_attn.kv_b_proj.weight", "layers.1.mlp.gate.weight")):
                tensor.data += 1
        result["changed"] = engine.stale_derived()
        result["after"] = engine.stale_derived()
        with torch.no_grad():
            engine.module.load_weights(load_file(Path(other, "model.safetensors")).items())
        result["loaded"] = engine.stale_derived()
        engine.begin()
        engine.scheduler = SimpleNamespace(flush_cache=lambda empty_cache: False)
        result["not flushed"] = caught(engine.drop_caches), engine.guard.ready
        results.append(result)
    return results


def load_megatron(rank: int, folder: str, cases: list[tuple[str, str, dict]]) -> list[list]:
    """On one of two ranks, of each (Hugging Face directory, Megatron directory, options): the tensors that SGLang
    has loaded otherwise from the second, by our option, than from the first, of how many, and what is logged;
    and what is said of wrong options."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/both", rank=rank, world_size=2)
    logged: list[str] = []
    logger, handler = logging.getLogger("sglang.srt.reshard"), logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def build(directory: str, option: dict, **options) -> dict[str, tuple]:
        return held(
            sglang_on_cpu.build(directory, model_loader_extra_config=json.dumps(option), **options)[0]
        )

    results: list[list] = []
    for hf, mcore, options in cases:
        ours, theirs = (
            build(f"{mcore}/hf", {"megatron": mcore}, **options),
            held(sglang_on_cpu.build(hf, **options)[0]),
        )
        differ = [name for name in theirs if ours.get(name) != theirs[name]]
        results.append([differ, len(theirs), [*logged]])
        logged.clear()
    hf, mcore, _ = cases[0]
    wrong = ({"megatron": hf}, {"megatron": mcore, "threads": 2}, {"megatron": 3}, {"megatrn": mcore})
    said = [said_by(lambda option=option: build(f"{mcore}/hf", option, tp=2)) for option in wrong]  # type: ignore[misc]
    return [*results, said]


def said_by(action) -> str:
    """The sentence of any error that an action raises."""
    try:
        action()
    except Exception as error:
        return str(error)
    return "no error"
