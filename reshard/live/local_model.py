"""The part of a live Megatron model that this rank holds, by published names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.core.extras import require
from reshard.core.limits import MAX_VOCAB_MULTIPLE, check_number
from reshard.device.memory import check_memory
from reshard.device.staging import check_one_device
from reshard.live.local_boxes import LocalBoxes
from reshard.megatron.parameters import padded_vocab_size
from reshard.models.model import Model
from reshard.trainers.megatron import MegatronModel

require("megatron", "torch", "megatron.core")

# The models of a trainer: what ``get_model`` returned, or a `MegatronModel` of them.
Models = Sequence[torch.nn.Module] | torch.nn.Module | MegatronModel


class LocalModel(LocalBoxes):
    """This rank's part of a live Megatron model."""

    trainer: MegatronModel
    holds_less_1 = True

    def __init__(self, models: Models, metadata: Mapping[str, Any] | None) -> None:
        if isinstance(models, MegatronModel):
            check_memory(models.models)  # it may have been made while they had some
            super().__init__(models)
        else:
            super().__init__(MegatronModel(models, metadata))
        check_one_device(self.trainer.models)

    def find_boxes(
        self, model: Model, make_vocab_size_divisible_by: int = 128, dtype: str | None = None
    ) -> None:
        """Find the boxes of a model's tensors, whose vocabulary is padded to a multiple of
        `make_vocab_size_divisible_by` times TP at most."""
        check_number(make_vocab_size_divisible_by, "make_vocab_size_divisible_by", MAX_VOCAB_MULTIPLE)
        super().find_boxes(model, make_vocab_size_divisible_by, dtype)
        self._check_padding(model, make_vocab_size_divisible_by)

    def _check_padding(self, model: Model, make_vocab_size_divisible_by: int) -> None:
        """Raise ReshardError if the vocabulary is padded by more than the rule gives: it is another
        one."""
        rows = self.trainer.vocabulary_rows or 0
        config: Any = self.trainer.config
        tp = config.tensor_model_parallel_size
        most = padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, tp)
        if rows > most:
            raise ReshardError(
                f"the trainer's model has {rows} vocabulary rows, but vocab_size {model.symbols['V']} of "
                f"{model.where} is padded to at most {most} at TP {tp}: it is another vocabulary, or give "
                f"the make_vocab_size_divisible_by that the trainer has"
            )
