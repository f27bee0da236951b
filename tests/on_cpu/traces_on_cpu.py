"""Traces of vLLM's real loader: one that is shown a few experts of layers that are alike, beside
one that is shown all of them."""

from functools import partial

from reshard.engines.tracing.canonical import canonical_tensors, expert_layers
from reshard.engines.tracing.deduplicated import trace_deduplicated
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.weights.stand_ins import layer_fingerprint, trace_model
from tests.on_cpu import vllm_on_cpu


def traces(rank: int, directory: str, change: str, engine: dict) -> dict:
    """How many tensors the loader was shown, of how many; whether its copies and fills are those of
    a trace that shows all. `change` makes one layer of the last two unlike the others, in what the
    modules say of themselves or only in what their loader does."""
    module, config = vllm_on_cpu.build(directory, load_format="dummy", **engine)
    model = VllmModel(module, config)
    canonical = canonical_tensors(model.model, config.model_config.dtype)
    layers, held = expert_layers(VLLM, model.model), model.rank.experts
    last = module.get_submodule(layers[-1].prefix.removesuffix("."))
    loader = next(m for m in last.modules() if "w13_weight" in m._parameters)
    if change == "kind":
        loader.__class__ = type("Other", (type(loader),), {})
    elif change == "loader":
        plain = type(loader)._map_global_expert_id_to_local_expert_id

        def turned(expert: int) -> int:
            local = plain(loader, expert)
            return local if local < 0 else len(held) - 1 - local

        loader._map_global_expert_id_to_local_expert_id = turned
    shown: list[int] = []
    plain_load = type(module).load_weights

    def counting(weights):
        weights = list(weights)
        shown.append(len(weights))
        return plain_load(module, iter(weights))

    module.load_weights = counting
    found = trace_deduplicated(
        partial(trace_model, module), canonical, layers, partial(layer_fingerprint, module), held
    )
    of_alike = list(shown)
    whole = trace_model(module, canonical)
    places = {copy.offset for copy in whole.copies if copy.name == layers[-1].experts[held[0]][0]}
    return {
        "shown": of_alike,
        "of": len(canonical),
        "places": places,
        "layers": len(layers),
        "same": sorted(map(repr, found.copies)) == sorted(map(repr, whole.copies))
        and found.fills == whole.fills,
    }
