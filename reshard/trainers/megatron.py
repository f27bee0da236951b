"""A live Megatron-Core model as the source of a refit."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor
from reshard.megatron.arguments import megatron_args
from reshard.megatron.checkpoint import EMBEDDING, OUTPUT
from reshard.megatron.hybrid import as_gpt_args, class_of_models, pattern_of
from reshard.megatron.parameters import expand
from reshard.megatron.towers import as_text_args, of_towers, with_tower
from reshard.models.config_fields import ignored
from reshard.models.field_tables import ROPE_FIELDS
from reshard.models.model import Model
from reshard.models.numerics_args import NUMERICS_ARGS, disagreements
from reshard.models.rope import inverse_frequencies
from reshard.models.towers import TAKES_TOWER
from reshard.refit.trainer import Trainer
from reshard.trainers.adapter_names import is_of_adapter, without_wrappers
from reshard.trainers.lora_scales import without_adapter_error
from reshard.trainers.megatron_lora import MegatronAdapter
from reshard.trainers.megatron_tower import check_towers
from reshard.trainers.plus_one import PlusOne
from reshard.trainers.shards import ShardedModel


class MegatronModel(ShardedModel):
    """The weights of one rank of a trainer.

    `models` is what Megatron's ``get_model`` returns: one chunk for each virtual stage, wrapped (DDP,
    Float16Module) or bare; wrapped where DDP has ``overlap_param_gather``.
    `metadata` is handed to ``sharded_state_dict``; a trainer that keeps its process
    groups out of ``parallel_state`` passes ``{"dp_cp_group": group}``.

    Raises ReshardError for what has no plain memory: quantized parameters, interleaved gate and up rows.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] | torch.nn.Module,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._as_published: PlusOne | None = None
        self.adapter_keys: set[str] = set()
        self._is_split = False  # the adapters are another source's
        self._weights: MegatronModel | None = None  # without them
        super().__init__(models, metadata)

    def _published_key(self, key: str) -> str | None:
        if is_of_adapter(key):
            self.adapter_keys.add(key)
            return None
        return without_wrappers(key)

    def split_adapter(self) -> tuple[Trainer, Trainer]:
        """Return the weights without the adapter of Megatron-Bridge's or mcore-bridge's modules, and the
        adapter, as two sources."""
        if self._weights is None:
            self._weights = copy(self)
            self._weights._is_split, self._weights._regions = True, [*self._regions]
            self._weights._host_copies = {}
        return self._weights, MegatronAdapter(self.chunks, self.metadata)

    def publish(self, model: Model) -> list[LocalTensor]:
        """Return what each shard holds of the tensors of `model`; each shard goes by its checkpoint key.

        Raises ReshardError too for parameters that the model's ``sharded_state_dict`` leaves out, such as
        adapters.
        """
        if self._left_out:
            raise ReshardError(
                f"the trainer's model has {len(self._left_out)} parameters that no published tensor fills, since its "
                f"sharded_state_dict leaves them out: {listed(self._left_out)}"
            )
        keys, where = self._keys(), "the trainer's model"
        if self.adapter_keys and not self._is_split:
            raise without_adapter_error(where, self.adapter_keys)
        vocabulary = self.vocabulary_rows
        if vocabulary is not None and vocabulary < model.symbols["V"]:
            raise ReshardError(
                f"{where} has {vocabulary} vocabulary rows, fewer than vocab_size "
                f"{model.symbols['V']} of {model.where}"
            )
        if model.mtp_layers and not any(key.startswith("mtp.") for key in keys):
            model = replace(model, mtp_layers=0)
        mapping = expand(model, padded_vocab=vocabulary, model_class=class_of_models(self.texts))
        of_tower = of_towers(keys)
        if of_tower and TAKES_TOWER not in model.config:
            raise ReshardError(
                f"{where} has a tower beside its language model ({listed(of_tower, 1)}), which is not taken there: to "
                f"leave that as it was loaded, give the language model alone (model.language_model of each chunk)"
            )
        mapping = with_tower(mapping, model, keys, where)
        held: dict[int, LocalTensor] = {}
        for index, before, tensor in self._placed(model, mapping, where):
            if before or index in held:
                raise ReshardError(
                    f"{where} has several layers or experts in one shard of {self.shards[index].key}, which "
                    f"is not supported"
                )
            held[index] = tensor._replace(id=index)
        return [held[index] for index in range(len(self.shards))]

    @property
    def vocabulary_rows(self) -> int | None:
        """The rows of the model's vocabulary with Megatron's padding of it; None on a rank that has none of it."""
        named = (shard for shard in self.shards if shard.key in (EMBEDDING, OUTPUT))
        return next((shard.shape[0] - self.gtp_padding.get(shard.key, 0) for shard in named), None)

    def as_published(self, model: Model) -> Trainer:
        """Return a trainer with the published numbers: the model may hold some norms less 1."""
        if not any(row.less_1 for block in model.blocks() for row in block.rows):
            return self
        names = expand(model).less_1
        if self._as_published is None or self._as_published.model != model:
            self._as_published = PlusOne(self, model, names)
        return self._as_published

    def check_model(self, model: Model, without: frozenset[str] = frozenset()) -> None:
        """Raise ReshardError, with both values, if Megatron's model does not compute what the served one
        does. This compares every setting of its config and of the model itself that decides what it computes,
        except those in `without`, and the frequencies of its rotary embeddings."""
        wanted, where = megatron_args(model), "the trainer's model"
        for chunk in self.models:
            check_towers(chunk, model)
        for chunk in self.texts:
            args = as_text_args(as_gpt_args(_settings(chunk), where), model, where)
            for name, theirs, ours in disagreements(args, wanted):
                if name not in ignored() | without:
                    raise ReshardError(
                        f"the trainer's {name} is {theirs}, but the served model's is {ours} ({model.where})"
                    )
            dtype = getattr(self.config, "moe_router_dtype", None)
            if model.num_experts and dtype not in (None, wanted.get("moe_router_dtype")):
                raise ReshardError(
                    f"the trainer's moe_router_dtype is {dtype}, but the served model's is "
                    f"{wanted.get('moe_router_dtype')}"
                )
            _check_rotary(chunk, model)


def _settings(model: torch.nn.Module) -> dict[str, Any]:
    """Return the settings of a live model that decide what it computes, by the names of Megatron's
    arguments."""
    config: Any = model.config
    settings = {name: getattr(config, name) for name in NUMERICS_ARGS if hasattr(config, name)}
    gated, function = getattr(config, "gated_linear_unit", None), getattr(config, "activation_func", None)
    if gated is not None and function is not None:
        settings["swiglu"] = gated and getattr(function, "__name__", type(function).__name__).lower() in (
            "silu",
            "swish",
        )
        settings["squared_relu"] = getattr(function, "__name__", "") == "squared_relu"
    if hasattr(config, "num_moe_experts"):
        settings["num_experts"] = config.num_moe_experts
    if isinstance(getattr(model, "share_embeddings_and_output_weights", None), bool):
        settings["untie_embeddings_and_output_weights"] = not model.share_embeddings_and_output_weights
    settings["hybrid_layer_pattern"] = pattern_of(model)
    of_model = {"position_embedding_type": "position_embedding_type"}
    if not settings.get("multi_latent_attention"):
        of_model |= {
            "rotary_base": "rotary_base",
            "rotary_percent": "rotary_percent",
            "use_rope_scaling": "rotary_scaling",
        }
    return settings | {arg: getattr(model, name) for arg, name in of_model.items() if hasattr(model, name)}


def _check_rotary(model: torch.nn.Module, served: Model) -> None:
    """Raise ReshardError if a rotary embedding of the model turns at other frequencies, or scales
    otherwise, than the served one."""
    expected = served.inverse_frequencies()
    for name, module in model.named_modules():
        angles = _frequencies(module)
        if angles is None or rope_is_ignored():
            continue
        if len(angles) != len(expected):
            raise ReshardError(
                f"the trainer's {name} turns {len(angles)} pairs of dims, but the served model's {len(expected)} "
                f"({served.where})"
            )
        far = [i for i, (a, b) in enumerate(zip(angles, expected)) if not math.isclose(a, b, rel_tol=1e-4)]
        if far:
            i = far[0]
            raise ReshardError(
                f"the trainer's {name} has inv_freq[{i}] = {angles[i]:.6g}, but the served "
                f"model's is {expected[i]:.6g} ({served.where})"
            )


def rope_is_ignored() -> bool:
    """Return True if a field of the config that rotary embeddings follow from is ignored."""
    return bool(ignored() & {*ROPE_FIELDS, "rotary_base", "max_position_embeddings"})


def _frequencies(module: torch.nn.Module) -> list[float] | None:
    """Return the angles by which a rotary embedding of Megatron turns from one position to the
    next; None for other modules."""
    plain = getattr(module, "inv_freq", None)
    if not isinstance(plain, torch.Tensor) or plain.ndim != 1:
        return None
    if hasattr(module, "inv_freq_extra"):  # YaRN, which mixes the two at every step
        names = ("scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        values: dict[str, Any] = {name: getattr(module, name) for name in names}
        values |= {
            "factor": values["scaling_factor"],
            "truncate": getattr(module, "correction_range_round_to_int", True),
        }
        return inverse_frequencies(
            values | {"rope_type": "yarn", "rope_theta": module.rotary_base}, 2 * len(plain)
        )
    factor = getattr(module, "seq_len_interpolation_factor", None) or 1
    return [angle / factor for angle in plain.tolist()]
