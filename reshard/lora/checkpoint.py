"""The adapter in a Megatron ``torch_dist`` checkpoint: which layers have one, in which form, of which rank."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from reshard.core.errors import ReshardError, listed
from reshard.formats.torch_dist import Key
from reshard.lora.names import CANONICAL, A, B, MatrixKey, megatron_name, parse_key
from reshard.lora.parameters import Adapter, AdapterForm, LinearLayer, linear_layers, part_names
from reshard.megatron.checkpoint import EMBEDDING, possible_keys
from reshard.megatron.parameters import ModelParameters
from reshard.models.model import Model

# Megatron-Bridge's and PEFT's names of the matrices of an adapter.
ADAPTER = re.compile(r"\.adapters?\.|\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)\b")
# What adapters put into the names of the weights that they wrap, once for each of them.
WRAPPED = re.compile(r"\.(?:(?:base_layer|to_wrap)\.)+")
# Keys of adapters that are more than B @ A, and what they are.
NOT_HELD = {
    "DoRA": re.compile(r"\.adapter\.(?:.*\.)?weight_magnitude$|\.lora_magnitude_vector\b"),
    "modules_to_save": re.compile(r"\.modules_to_save\."),
    "an adapter of embeddings": re.compile(r"\.lora_embedding_[AB]\b|embedding\..*\.(?:adapter|lora_[AB])\."),
    "an adapter of the output layer": re.compile(r"^output_layer\.(?:adapter|lora_[AB])\."),
    "several adapters at once (Multi-LoRA)": re.compile(r"\.adapters\.[^.]+\.linear_(?:in|out)\."),
    "biases of an adapter": re.compile(r"\.(?:adapter|lora_[AB])\..*\.bias\d*$"),
}


class AdapterOnlyError(ReshardError):
    """Raised where a model's checkpoint holds nothing but an adapter."""


def base_keys(keys: Mapping[str, Key], where: object, without_adapters: bool) -> dict[str, Key]:
    """Return the keys of a model, under the names that they have without an adapter. Raises ReshardError if there is an
    adapter beside it that is not to be left out, or an adapter alone."""
    own = set(adapter_keys(keys))
    if not own or (without_adapters and EMBEDDING in keys):
        keys = {WRAPPED.sub(".", key): entry for key, entry in keys.items() if key not in own}
    adapters = sorted(key for key in keys if ADAPTER.search(key))
    if adapters and EMBEDDING not in keys:
        raise AdapterOnlyError(
            f"{where} holds a LoRA adapter ({len(adapters)} tensors: {listed(adapters, 2)}) and no model: reshard "
            f"lora-to-peft converts it, reshard lora-merge adds it to its model"
        )
    if adapters:
        raise ReshardError(
            f"{where} holds a LoRA adapter ({len(adapters)} tensors: {listed(adapters, 2)}) beside the "
            "model's weights: pass --without-adapters for the weights alone, or convert the adapter with "
            "reshard lora-to-peft"
        )
    return dict(keys)


def adapter_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys that belong to an adapter, its states and what is not held of it among them."""
    return [key for key in keys if ADAPTER.search(key) or any(p.search(key) for p in NOT_HELD.values())]


def find_adapters(
    keys: Mapping[str, Key], where: object, model: Model, base: ModelParameters, swiglu_ranks: int = 1
) -> tuple[list[Adapter], AdapterForm]:
    """Return the adapters whose matrices are among these keys, and the form that they have.

    Raises ReshardError, naming it, for an adapter that is more than pairs of matrices, and for keys
    of several forms.
    """
    check_supported(keys, where)
    parsed = {key: matrix for key in keys if (matrix := parse_key(key)) is not None}
    if not parsed:
        raise ReshardError(
            f"{where} holds no LoRA adapter: no key ends with linear_in.weight or has lora_A in it"
        )
    form = _form_of(parsed, where, swiglu_ranks)
    adapters = []
    for layer in linear_layers(base):
        adapter = _adapter_of(layer, keys, model, form)
        if adapter is not None:
            adapters.append(adapter)
    return adapters, form


def check_supported(keys: Iterable[str], where: object) -> None:
    """Raise ReshardError, naming it, if keys belong to an adapter that is more than pairs of matrices."""
    keys = list(keys)
    for what, pattern in NOT_HELD.items():
        matching = [key for key in keys if pattern.search(key)]
        if matching:
            raise ReshardError(
                f"{where} has {what} ({listed(matching, 2)}), which is not converted: only LoRA's A and B are"
            )


def _form_of(parsed: Mapping[str, MatrixKey], where: object, swiglu_ranks: int) -> AdapterForm:
    adapters = {matrix.adapter for matrix in parsed.values()}
    if len(adapters) > 1:
        names = sorted("Megatron-Bridge's" if name is None else repr(name) for name in adapters)
        raise ReshardError(
            f"{where} holds {len(adapters)} adapters, {listed(names)}: one at a time is converted"
        )
    [adapter] = adapters
    canonical = any(matrix.part in CANONICAL.values() for matrix in parsed.values())
    return AdapterForm(canonical, adapter, swiglu_ranks)


def _adapter_of(
    layer: LinearLayer, keys: Mapping[str, Key], model: Model, form: AdapterForm
) -> Adapter | None:
    """Return the adapter of a layer, or None if no key has one."""
    if form.canonical and len(layer.published()) > 1 and not layer.of_experts:
        ranks = {}
        for name, part in zip(layer.published(), part_names(layer), strict=True):
            key = _key_of(layer, megatron_name(layer.module, A, part), keys, model)
            if key is not None:
                ranks[name] = keys[key].shape[-2]
        return Adapter(layer, ranks) if ranks else None
    key_by_matrix = {
        m: _key_of(layer, megatron_name(layer.module, m, adapter=form.adapter), keys, model) for m in (A, B)
    }
    key_a = key_by_matrix[A]
    if key_a is None:
        return None
    rank = keys[key_a].shape[-2]
    shared = frozenset(
        matrix
        for matrix, key in key_by_matrix.items()
        if key is not None and _is_shared(layer, keys[key], key, model)
    )
    ranks = {part.name: rank for weight in layer.weights for part in weight.parts}
    return Adapter(layer, ranks, shared)


def _key_of(layer: LinearLayer, name: str, keys: Mapping[str, Key], model: Model) -> str | None:
    """Return the key of a matrix with this name in a layer, None if there is none."""
    wanted = replace(layer.first, name=name, local_name=name, halves=1)
    for key, stack, _ in possible_keys(wanted, model, keys):
        dims = len(stack) + 2
        if key in keys and len(keys[key].shape) in (
            (dims, max(2, dims - 1)) if layer.of_experts else (dims,)
        ):
            return key
    return None


def _is_shared(layer: LinearLayer, key: Key, name: str, model: Model) -> bool:
    """Return True if all experts of a layer have one matrix: the key has no dim for the expert."""
    if not layer.of_experts:
        return False
    per_layer = name.startswith("decoder.layers.") and not name.split(".")[2].isdigit()
    return len(key.shape) == 2 + per_layer and f".{layer.first.expert}." not in name.removeprefix(
        layer.first.prefix
    )
