"""Checkpoints of Megatron-FSDP (``--ckpt-format fsdp_dtensor``), as ``torch_dist`` has the same model.

Both are written by ``torch.distributed.checkpoint``. Megatron-FSDP's keys are the names of its modules, below
``model.module.``: every layer and every expert has keys of its own, as have both halves of SwiGLU. That is a scheme
which `reshard.megatron.checkpoint` reads, but for how it names experts. What ``common.pt`` has are objects.
"""

import re
from typing import Any

from reshard.core.errors import ReshardError
from reshard.formats import pickles, torch_zip
from reshard.formats.torch_dist import Checkpoint, Stored
from reshard.megatron.checkpoint import EMBEDDING, NOT_WEIGHTS

FORMAT = "fsdp_dtensor"
_MODEL = re.compile(r"model\.(?:module\.)*")
_GROUPED = re.compile(
    r"(.*\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)(_[wv])?"
)  # as Transformer Engine has them
_SEQUENTIAL = re.compile(r"(.*\.experts\.)local_experts\.(\d+\..+)")
_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
_OTHERS = (*NOT_WEIGHTS["optimizer state"], *NOT_WEIGHTS["RNG state"])


class FsdpDtensor(Checkpoint):
    """A checkpoint of Megatron-FSDP with the keys of ``torch_dist``."""

    def common(self) -> dict[str, Any]:
        """Return what ``common.pt`` has: args and iteration, of the objects that are stored apart."""
        args, iteration = self._object("args"), self._object("iteration")
        if not isinstance(args, (pickles.Call, dict, type(None))):
            raise ReshardError(f"{self.directory} has args of type {type(args).__name__}, not a namespace")
        fields = args.fields if isinstance(args, pickles.Call) else dict(args or {})
        return {
            "args": fields,
            "iteration": iteration if type(iteration) is int else None,
            "content_metadata": {"distrib_optim_sharding_type": FORMAT},
        }

    def common_storages(self) -> dict[str, bytes]:
        return {}

    def _object(self, name: str) -> Any:
        stored = self.objects.get(_common(name))
        if stored is None:
            return None
        where = f"{self.directory / stored.file} ({name})"
        return torch_zip.stored_object(self.reader(stored), stored.length, where)


def as_torch_dist(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of Megatron-FSDP with the keys of ``torch_dist``; any other as it is. Raises ReshardError for
    one in ``torch_dcp``, and for one that does not say which of the two it is in."""
    sharded = [
        key for key in checkpoint.keys if key.endswith(f".{EMBEDDING}") and _MODEL.match(key) is not None
    ]
    if EMBEDDING in checkpoint.keys or not sharded:
        return checkpoint
    objects: dict[str, Stored] = {}
    for key, stored in checkpoint.objects.items():
        own = _renamed(key)
        objects[own if own != key or key.startswith(_OTHERS) else _common(key)] = stored
    names = {key: _renamed(key) for key in checkpoint.keys}
    modules = {name.rpartition(".")[0] for name in names.values()}
    keys = {_with_norm(names[key], modules): entry for key, entry in checkpoint.keys.items()}
    if len(keys) != len(checkpoint.keys):
        raise ReshardError(f"{checkpoint.directory} has two tensors for one parameter of Megatron")
    renamed = FsdpDtensor(checkpoint.directory, checkpoint.iteration, keys, objects)
    named = renamed.common()["args"].get("ckpt_format")
    # Under torch_dcp, the halves of SwiGLU are not apart.
    if named != FORMAT and (named is not None or not any(key.endswith(("_w", "_v")) for key in keys)):
        raise ReshardError(
            f"{checkpoint.directory} is in the format 'torch_dcp' of Megatron's FSDP2, or does not say that it is in "
            f"{FORMAT!r} ({sharded[0]}), and is not read: save it with --ckpt-format torch_dist or {FORMAT}"
        )
    return renamed


def _renamed(key: str) -> str:
    """Return the key that a parameter of Megatron-FSDP has in ``torch_dist``; that of anything else as it is."""
    own = _MODEL.match(key)
    if own is None:
        return key
    name = key[own.end() :]
    if grouped := _GROUPED.fullmatch(name):
        return f"{grouped[1]}experts.{grouped[3]}.{grouped[2]}{grouped[4] or ''}"
    if sequential := _SEQUENTIAL.fullmatch(name):
        return f"{sequential[1]}experts.{sequential[2]}"
    return name


def _with_norm(name: str, modules: set[str]) -> str:
    """Return the key of a norm of Megatron's local layers, which ``torch_dist`` names as a part of the linear layer
    after it, as it is in Transformer Engine's; any other as it is."""
    for norm, linear in _NORMS.items():
        layer = name.removesuffix(f"{norm}.weight")
        if layer != name and layer + linear in modules:
            return f"{layer}{linear}.layer_norm_weight"
    return name


def _common(name: str) -> str:
    return f"common_state/{name}"
