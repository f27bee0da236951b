"""The tensors of a vLLM model that a refit does not write: what vLLM derives from the weights, and
what is left alone, by the kind of the module that has it."""

from collections.abc import Collection, Mapping

import torch

from reshard.engines.placing.accounts import DERIVED, LEFT_ALONE, OF_TOWER, SCALE_OF_CACHE, Account
from reshard.engines.vllm.layers import has_cache, has_experts
from reshard.engines.vllm.weights.mla import DERIVED_PREFIX

PROCESSED = Account(DERIVED, "vLLM's own processing makes it of the weights that a refit brings to its layer")
ABSORBED = Account(DERIVED, "vLLM's own processing makes it of kv_b_proj")
COMPUTED = Account(DERIVED, "vLLM's own loader makes it of A_log")
ADAPTERS = Account(LEFT_ALONE, "the adapters of a layer, which hold what vLLM has loaded into them")
NOT_SAVED = Account(LEFT_ALONE, "vLLM computes it from the config, and saves it nowhere")

PLACES_OF_EXPERTS = Account(LEFT_ALONE, "vLLM computes from the config where experts lie")

# Which modules, by a test; the names of their tensors, without leading underscores; their account.
LEFT_ALONE_BY_KIND = (
    (has_cache, {"k_scale", "v_scale", "q_scale", "prob_scale"}, SCALE_OF_CACHE),
    (has_experts, {"expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global",
                   "expert_local_to_global"}, PLACES_OF_EXPERTS),
)  # fmt: skip


def other_accounts(
    modules: Mapping[str, torch.nn.Module],
    tensors: Collection[str],
    reloaded: Collection[str],
    attentions: Collection[str],
    decays: Collection[str],
    towers: tuple[str, ...] = (),
) -> dict[str, Account]:
    """Return the accounts of those `tensors`, named parameters and buffers, that a refit does not
    write.

    Of the modules named in `reloaded` vLLM's processing makes all parameters anew, of those in
    `attentions` the matrices that are made of ``kv_b_proj``; its loader makes those named in `decays`.
    What begins with one of `towers` is of other parts than the language model.
    """
    accounts: dict[str, Account] = {}
    for name in tensors:
        layer, _, key = name.rpartition(".")
        module = modules[layer]
        if layer in reloaded and key in module._parameters:
            accounts[name] = PROCESSED
        elif layer in attentions and key.startswith(DERIVED_PREFIX):
            accounts[name] = ABSORBED
        elif name in decays:
            accounts[name] = COMPUTED
        elif name.startswith(towers):
            accounts[name] = OF_TOWER
        elif key in module._non_persistent_buffers_set:
            accounts[name] = NOT_SAVED
        else:
            for is_of_kind, keys, account in LEFT_ALONE_BY_KIND:
                if key.lstrip("_") in keys and is_of_kind(module):
                    accounts[name] = account
    return accounts
