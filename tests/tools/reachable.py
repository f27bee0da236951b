"""Every tensor that a model holds, wherever its engine keeps it."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

WORDS = 1 << 24  # that a GPU sums at once


def bits_of(tensor: torch.Tensor) -> list:
    """The shape, the strides, the dtype and a checksum of the bits of a tensor."""
    flat = tensor.detach().contiguous().flatten()
    octets = flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8)
    checksum = summed(octets) if octets.is_cuda else zlib.crc32(octets.numpy().tobytes())
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), checksum]


def summed(octets: torch.Tensor) -> int:
    """A sum of bytes, in words that count by their place."""
    words = torch.nn.functional.pad(octets, (0, -len(octets) % 8)).view(torch.int64)
    total = 0
    for start in range(0, len(words), WORDS):
        some = words[start : start + WORDS]
        places = 2 * torch.arange(start, start + len(some), device=words.device) + 1
        total += int((((some >> 29) ^ some) * places).sum())
    return total


def reachable(module: torch.nn.Module, package: str = "vllm.") -> dict[str, list]:
    """The bits of every tensor that a model of an engine's `package` holds: in parameters, buffers and plain
    attributes, in kernels, configs, and lists of these."""
    found: dict[str, list] = {}
    seen: set[int] = set()

    def parts(one: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(one, dict):
            yield from ((str(key), value) for key, value in one.items())
        elif isinstance(one, list | tuple):
            yield from ((str(place), value) for place, value in enumerate(one))
        elif isinstance(one, torch.nn.Module) or type(one).__module__.startswith(package):
            yield from vars(one).items() if hasattr(one, "__dict__") else ()

    def walk(name: str, one: Any) -> None:
        if isinstance(one, torch.Tensor):
            if not one.is_meta:
                found[name] = bits_of(one)
        elif id(one) not in seen and not isinstance(one, type):
            seen.add(id(one))
            for key, value in parts(one):
                walk(f"{name}.{key}", value)

    walk("", module)
    return found
