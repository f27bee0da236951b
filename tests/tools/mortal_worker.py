"""An extension of vLLM's workers, of which one can be told to die, to fail, or to change a number."""

import os
import signal
from hashlib import sha256

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.worker import RefitExtension


def own_checksums(model: torch.nn.Module) -> dict[str, str]:
    """The checksums of a model's parameters, as vLLM takes them from 0.33 on."""
    return {
        name: sha256(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, parameter in model.named_parameters()
    }


class MortalExtension(RefitExtension):
    """For ``worker_extension_cls``."""

    dies = False

    def die_at_the_next_meeting(self) -> None:
        """Before it has joined there."""
        self.dies = True

    def fail_the_next_refit(self, ranks: tuple[int, ...]) -> None:
        """On these workers, when all bytes have moved."""
        if self.rank not in ranks:
            return
        link = self._reshard_link
        plain = link._verify

        def broken() -> None:
            link._verify = plain
            raise ReshardError(f"the digests of worker {self.rank} are gone")

        link._verify = broken

    def change_a_number(self, engine: int) -> None:
        """Of the weights of one engine of several of a model, as nothing that the guard sees would."""
        if self.vllm_config.parallel_config.data_parallel_index == engine:
            next(self.get_model().parameters()).data.view(-1)[:1] += 1

    def own_checksums(self) -> dict[str, str]:
        """The checksums of this worker's parameters."""
        prefix_of = getattr(self, "_weight_checksum_prefix", str)
        return {f"{prefix_of()}{name}": value for name, value in own_checksums(self.get_model()).items()}

    def reshard_connect_worker(self, *args, **kwargs) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super().reshard_connect_worker(*args, **kwargs)
