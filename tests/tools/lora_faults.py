"""Mistakes that an engine or a trainer makes while an adapter is refitted, and what is said of them."""

from functools import partial

from reshard.engines.vllm.adapters import live
from reshard.lora.scale import Scale
from tests.starting.ranks import caught


def fault(link, engine, change) -> list[str]:
    """What a verified refit says while the engine makes a mistake, and the name of what it serves then."""
    plain = live.VllmAdapter.process_round

    def wrong(self, index: int) -> None:
        plain(self, index)
        change(self)

    live.VllmAdapter.process_round = wrong
    try:
        return [caught(partial(link.refit, verify=True)), engine.adapter("policy").request().lora_name]
    finally:
        live.VllmAdapter.process_round = plain


def exchange_keys_and_values(adapter) -> None:
    stages = [stage for stage in adapter._stages.all if stage.layer.endswith("layers.1.self_attn.qkv_proj")]
    _, (_, keys), (_, values) = [stage.slot(adapter._writing) for stage in stages]
    kept = keys.clone()
    keys.copy_(values)
    values.copy_(kept)


def leave_stale(adapter) -> None:
    stage = adapter._stages.all[0]
    a, _ = stage.slot(adapter._writing)
    a.copy_(a + 1)


def apart(link, engine, _) -> list[str]:
    """Another A for up than for gate, of one layer, where vLLM has one for both."""
    plain = live.VllmAdapter.process_round

    def changed(self, index: int) -> None:
        next(stage for stage in self._stages.all if stage.others).others[0][0] += 1
        plain(self, index)

    live.VllmAdapter.process_round = changed
    try:
        return [caught(link.refit), engine.adapter("policy").request().lora_name]
    finally:
        live.VllmAdapter.process_round = plain


def double(adapter) -> None:
    stage = adapter._stages.all[-1]
    stage.slot(adapter._writing)[1].mul_(2)


def alpha_changed(link, engine, models) -> list[str]:
    module = next(m for model in models for m in model.modules() if hasattr(m, "linear_in"))
    module.alpha *= 2
    try:
        return [caught(link.refit), engine.adapter("policy").request().lora_name]
    finally:
        module.alpha /= 2


def disabled(link, engine, models) -> list[str]:
    wrappers = [m for model in models for m in model.modules() if hasattr(m, "disable_adapter_layers")]
    for module in wrappers:
        module.disable_adapter_layers()
    try:
        return [caught(link.refit), engine.adapter("policy").request().lora_name]
    finally:
        for module in wrappers:
            module.enable_adapter_layers()


def absorbed(link, engine, _) -> list[str]:
    """An adapter of the layer of which MLA makes matrices, connected beside the one that serves."""
    weight = "model.layers.1.self_attn.kv_b_proj.weight"
    return [
        caught(lambda: engine.adapter("other").take_scales({weight: Scale(4, 8.0)})),
        engine.adapter("policy").request().lora_name,
    ]


def taken(link, engine, _) -> list[str]:
    """Another connection under the same name, of one layer less."""
    scales = dict(link.sender.source.scales())
    scales.popitem()
    engine.adapter("policy").take_scales(scales)
    return [caught(link.refit), engine.adapter("policy").request().lora_name]


FAULTS = {
    "taken": taken,
    "absorbed": absorbed,
    "exchanged": lambda link, engine, _: fault(link, engine, exchange_keys_and_values),
    "stale": lambda link, engine, _: fault(link, engine, leave_stale),
    "doubled": lambda link, engine, _: fault(link, engine, double),
    "alpha": alpha_changed,
    "disabled": disabled,
    "apart": apart,
}
