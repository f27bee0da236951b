"""What engines have in common that hand on their weights as they serve them (`reshard.refit.twins`)."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch

from reshard.engines.layout import EngineRank
from reshard.engines.placing.accounts import LEFT_ALONE, SCALE_OF_CACHE, Account

MOST_RUNS = 4  # of numbers that are told one by one
DIGEST_BYTES = 8
SCALE_NUMBER = "_scale_float"  # ends the names of the numbers that attention keeps beside its cache's scales


def part_of_model(rank: EngineRank) -> str:
    """Return which part of a model a rank holds, the same for ranks that hold the same."""
    experts = f"experts {runs(rank.experts)}" if rank.experts else "no experts"
    split = f", each split {rank.moe_tp_rank} of {rank.moe_tp}" if rank.moe_tp > 1 else ""
    return f"TP {rank.tp_rank} of {rank.tp}, layers {runs(rank.layers)}, {experts}{split}"


def runs(numbers: Iterable[int]) -> str:
    """Return numbers as runs of consecutive ones; of many runs how many numbers there are, and a digest.

    >>> runs([0, 1, 2, 5])
    '0-2 5'
    """
    found: list[list[int]] = []
    numbers = [*numbers]
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    if len(found) > MOST_RUNS:
        return f"({len(numbers)}, {blake2b(repr(numbers).encode(), digest_size=DIGEST_BYTES).hexdigest()})"
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or "none"


def written_tensors(
    tensors: Mapping[str, torch.Tensor], accounts: Mapping[str, Account]
) -> dict[str, torch.Tensor]:
    """Return those of an engine's tensors that a refit writes, or has it derive."""
    return {name: tensor for name, tensor in tensors.items() if accounts[name].what != LEFT_ALONE}


def scales_of_cache(
    tensors: Mapping[str, torch.Tensor],
    accounts: Mapping[str, Account],
    modules: Mapping[str, torch.nn.Module],
) -> dict[str, str]:
    """Return the scales of each attention's fp8 keys and values as facts: they came with a checkpoint, and a refit
    leaves them alone. Engines keep them as tensors, and as numbers beside these."""
    scales: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if accounts[name] == SCALE_OF_CACHE:
            layer, _, key = name.rpartition(".")
            scales.setdefault(layer, {})[key] = tensor
    for layer, of_layer in scales.items():
        numbers = {key: value for key, value in vars(modules[layer]).items() if key.endswith(SCALE_NUMBER)}
        of_layer |= {key: torch.tensor(value) for key, value in numbers.items() if value is not None}
    return {f"the scales of the cache of {layer}": digest_of(of_layer) for layer, of_layer in scales.items()}


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the bits of tensors and of their names."""
    total = blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).cpu()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode() + bits.numpy().tobytes())
    return total.hexdigest()
