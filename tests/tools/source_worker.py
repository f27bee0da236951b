"""A worker of vLLM whose engine is the source of other engines' refits."""

import zlib
from typing import Any

import torch

from reshard.engines.vllm.worker import RefitExtension
from reshard.refit import RefitGroup, connect


class SourceExtension(RefitExtension):
    """In place of `RefitExtension`."""

    def connect_as_source(self, address: str, size: int) -> None:
        """Connect this worker as the member of its own rank, with what it serves as the source."""
        self.reshard_close()
        group = RefitGroup.join(address, self._reshard_rank(), size, timeout=120)
        self._reshard_link = connect(group, source=self._reshard_side(False))

    def refit_others(self, version: int) -> None:
        """Refit the other engine."""
        self._reshard_connected().refit(version, verify=True)

    def lose_and_refit_others(self) -> None:
        """Refit it as if vLLM had discarded the weights of this worker."""
        self._reshard_engine.guard.lose("weights that vLLM has discarded")
        self.refit_others(5)

    def find(self) -> None:
        """Serve again."""
        self._reshard_engine.guard.loaded()

    def fingerprints(self) -> dict[str, int]:
        """Return a fingerprint of every parameter."""
        parameters = self.get_model().named_parameters()  # type: ignore[attr-defined]
        return {name: zlib.crc32(bits(one).numpy()) for name, one in parameters}

    def scribble(self) -> None:
        """Fill every parameter with one value."""
        for parameter in self.get_model().parameters():  # type: ignore[attr-defined]
            parameter.data.fill_(7.0)

    def flip(self) -> None:
        """Change the last bit of a parameter's last element."""
        bits(dict(self.get_model().named_parameters())["model.norm.weight"])[-1] ^= 1  # type: ignore[attr-defined]


def bits(tensor: Any) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
