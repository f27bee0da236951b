"""Bands for what no formula gives: memory outside of torch's allocator, fragmentation, unevenly
routed tokens.

Measured by others, and far apart: 6.4 GB besides what torch had reserved for DeepSeek-V3 on 64 H100
(Megatron-LM issue 6429), 5.8 GiB as context 0.5, world 0.4, groups 1, first forward 3 (Pith-Train),
0.5 to 0.7 GB for each NCCL communicator (nccl issue 964).
"""

import re
from typing import NamedTuple

from reshard.core.errors import OptionError
from reshard.memory.options import GIB, TrainingSetup


class Band(NamedTuple):
    """Bytes, at least and at most."""

    low: int
    high: int

    def __add__(self, other: "Band") -> "Band":  # type: ignore[override]
        return Band(self.low + other.low, self.high + other.high)


CONTEXT = Band(int(0.4 * GIB), int(0.7 * GIB))
COMMUNICATOR = Band(int(0.15 * GIB), int(0.7 * GIB))
# Kernels that are loaded when they are first called, and their workspaces.
FIRST_FORWARD = Band(int(0.5 * GIB), int(3.0 * GIB))
# Reserved for allocated bytes, of torch's caching allocator without expandable segments.
RESERVED = (1.01, 1.09)
# How many times its even share the fullest expert parallel rank got with trained routers.
IMBALANCE = 1.2


def outside(setup: TrainingSetup) -> Band:
    """Return the memory of a rank's context, communicators and kernels."""
    layout, cp = setup.layout, setup.training.cp
    axes = [layout.tp, layout.pp, cp, setup.dp * cp]
    if setup.model.num_experts:
        axes += [layout.ep, layout.expert_tp if layout.expert_tp != layout.tp else 1, setup.expert_dp]
    groups = sum(size > 1 for size in axes) + (setup.ranks > 1)
    return CONTEXT + FIRST_FORWARD + Band(groups * COMMUNICATOR.low, groups * COMMUNICATOR.high)


# What torch.cuda.mem_get_info has in total, GiB.
GPUS = {"a100-40": 39.4, "a100": 79.1, "h100": 79.1, "h800": 79.1, "h20": 95.1, "h200": 139.8, "b200": 178.4}


def bytes_of_gpu(text: str) -> int:
    """Return the bytes of a GPU: ``80GB`` (of 1e9), ``79.1GiB``, or a card by its name, such as
    H100. Raises ReshardError for anything else."""
    name = text.strip().lower()
    if name in GPUS:
        return int(GPUS[name] * GIB)
    size = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(gib|gb|g)", name)
    if not size or not float(size[1]):
        raise OptionError(
            f"--gpu-memory {text:.80} is not a size such as 80GB or 79.1GiB, nor one of the cards {', '.join(GPUS)}"
        )
    return int(float(size[1]) * (GIB if size[2] == "gib" else 10**9))
