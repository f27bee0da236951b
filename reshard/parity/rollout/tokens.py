"""The tokens of a rollout that count, as flat arrays, from whatever a trainer has.

Values come as arrays or tensors, on any device and in any dtype, ``[samples, tokens]`` or ``[tokens]``, padded or
nested, or as a list of such: a ragged rollout, or one of several micro-batches. Of a tensor on a GPU only the tokens
that count are copied to the host, and of routed experts only which tokens' experts differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reshard.core.errors import OptionError, ReshardError


class UnscoredError(ReshardError):
    """A rollout whose values say nothing: no token counts, or a logprob is NaN or infinite."""


@dataclass(frozen=True)
class Tokens:
    """The n tokens that count, sample after sample.

    `train` and `inference` ``[n]``: their logprobs in nats, in float64. `counts` ``[samples]``: how many of each
    sample count. `lag` ``[n]``: how many versions of the weights the trainer is ahead of those that made the token.
    `rerouted` ``[n]``: True where the two systems sent the token to different experts in some layer. Both are None
    where it is not known.
    """

    train: np.ndarray
    inference: np.ndarray
    counts: np.ndarray
    lag: np.ndarray | None = None
    rerouted: np.ndarray | None = None

    @cached_property
    def log_ratio(self) -> np.ndarray:
        """``[n]``: log of the importance ratio p_train / p_inference."""
        return self.train - self.inference

    @cached_property
    def samples(self) -> np.ndarray:
        """``[n]``: the sample of each token."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def select(
    train: Any,
    inference: Any,
    mask: Any = None,
    *,
    train_experts: Any = None,
    inference_experts: Any = None,
    versions: Any = None,
    version: int | None = None,
) -> Tokens:
    """Return the tokens that `mask` counts; the arguments are those of `reshard.parity.check_rollout`.

    Raises ReshardError for shapes that differ, OptionError for one of two arguments that need each other, and
    UnscoredError if no token counts or a logprob is not finite.
    """
    if (train_experts is None) != (inference_experts is None):
        raise OptionError("the experts of one side say nothing: give train_experts and inference_experts")
    if (versions is None) != (version is None):
        raise OptionError("staleness needs versions, of the tokens, and version, the trainer's")
    given: dict[str, tuple[Any, int]] = {  # by name, with the dims of a token's value
        "the trainer's logprobs": (train, 0),
        "the engine's logprobs": (inference, 0),
        "the mask": (mask, 0),
        "the trainer's experts": (train_experts, 2),
        "the engine's experts": (inference_experts, 2),
    }
    blocks = {name: _blocks(value) for name, (value, _) in given.items() if value is not None}
    by_sample = None if versions is None else _versions_of_samples(versions, blocks["the trainer's logprobs"])
    if versions is not None and by_sample is None:
        blocks["the versions"], given["the versions"] = _blocks(versions), (versions, 0)
    blocks = _aligned({name: (value, given[name][1]) for name, value in blocks.items()})
    shapes = [block.shape for block in blocks["the trainer's logprobs"]]
    masks = blocks.get("the mask", [None] * len(shapes))
    counts = [_counts(shape, mask) for shape, mask in zip(shapes, masks, strict=True)]

    def picked(name: str) -> np.ndarray:
        return np.concatenate(
            [_picked(block, mask) for block, mask in zip(blocks[name], masks, strict=True)] or [np.zeros(0)]
        )

    tokens = Tokens(
        picked("the trainer's logprobs").astype(np.float64),
        picked("the engine's logprobs").astype(np.float64),
        np.concatenate(counts or [np.zeros(0, np.int64)]),
    )
    _check_values(tokens)
    lag = rerouted = None
    if version is not None:
        made_by = np.repeat(by_sample, tokens.counts) if by_sample is not None else picked("the versions")
        lag = version - made_by.astype(np.int64)
        if lag.min() < 0:
            raise ReshardError(
                f"a token was made by version {version - int(lag.min())}, which is newer than the trainer's {version}: "
                "give the version of the weights that made the trainer's logprobs, counted as the engine's"
            )
    if train_experts is not None:
        pairs = zip(blocks["the trainer's experts"], blocks["the engine's experts"], masks, strict=True)
        rerouted = np.concatenate([_picked(_differ(a, b, mask), mask) for a, b, mask in pairs])
    return Tokens(tokens.train, tokens.inference, tokens.counts, lag, rerouted)


def _check_values(tokens: Tokens) -> None:
    if not len(tokens.train):
        raise UnscoredError("no token of the rollout counts: there is nothing to compare")
    for who, values in (("trainer", tokens.train), ("engine", tokens.inference)):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            sample = tokens.samples[bad[0]]
            place = bad[0] - tokens.counts[:sample].sum() + 1
            raise UnscoredError(
                f"the {who} gives the logprob {values[bad[0]]} for token {place} of those that count of sample {sample}"
            )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _blocks(values: Any) -> list[Any]:
    """Return arrays or tensors that hold the values one after the other."""
    if _is_tensor(values):
        return list(values.detach().unbind()) if values.is_nested else [values.detach()]
    if isinstance(values, np.ndarray) and values.dtype != object:
        return [values]
    items = list(values)
    if items and all(not hasattr(item, "__len__") or getattr(item, "ndim", 1) == 0 for item in items):
        return [np.asarray([float(item) for item in items])]
    return [block for item in items for block in (_blocks(item) if _is_tensor(item) else [np.asarray(item)])]


def _aligned(named: dict[str, tuple[list[Any], int]]) -> dict[str, list[Any]]:
    """Return the blocks of each name, split into samples where not all come in the same blocks.

    Raises ReshardError if a sample's shapes differ."""
    ways = {tuple(block.ndim - dims for block in blocks) for blocks, dims in named.values()}
    if len(ways) > 1:
        named = {
            name: ([row for block in blocks for row in (block if block.ndim - dims > 1 else [block])], dims)
            for name, (blocks, dims) in named.items()
        }
    first, *others = named
    expected = [tuple(block.shape) for block in named[first][0]]
    for name in others:
        blocks, dims = named[name]
        shapes = [tuple(block.shape[: block.ndim - dims]) for block in blocks]
        if shapes != expected:
            pairs = enumerate(zip(expected, shapes, strict=False))
            where, pair = next(((f" of block {i}", p) for i, p in pairs if p[0] != p[1]), ("", None))
            one, other = pair or (f"{len(expected)} samples", f"{len(shapes)}")
            raise ReshardError(f"{first} have shape {one}{where}, {name} {other}")
    if "the trainer's experts" in named:
        for a, b in zip(named["the trainer's experts"][0], named["the engine's experts"][0], strict=True):
            if a.shape != b.shape:
                raise ReshardError(
                    f"the trainer's experts have shape {tuple(a.shape)}, the engine's {tuple(b.shape)}: give the same "
                    "layers of both"
                )
    return {name: blocks for name, (blocks, _) in named.items()}


def _versions_of_samples(versions: Any, logprobs: Sequence[Any]) -> np.ndarray | None:
    """Return the version that made each sample ``[samples]``; None if versions are given for each token."""
    samples = sum(block.shape[0] if block.ndim == 2 else 1 for block in logprobs)
    if isinstance(versions, int | np.integer):
        return np.full(samples, int(versions), np.int64)
    blocks = _blocks(versions)
    of_tokens = len(logprobs) == 1 and len(blocks) == 1 and blocks[0].shape == logprobs[0].shape
    if not of_tokens and len(blocks) == 1 and tuple(blocks[0].shape) == (samples,):
        return _on_host(blocks[0]).astype(np.int64)
    return None


def _on_host(values: Any) -> np.ndarray:
    """Return values as an array; NumPy has no bfloat16, of which each number is one of float32."""
    if not _is_tensor(values):
        return np.asarray(values)
    values = values.cpu()
    return (values.float() if values.is_floating_point() and values.element_size() < 4 else values).numpy()


def _like(mask: Any, values: Any) -> Any:
    """Return a mask as booleans, where the values are."""
    if not _is_tensor(values):
        return _on_host(mask) != 0
    if not _is_tensor(mask):
        import torch

        mask = torch.as_tensor(np.ascontiguousarray(mask))
    return (mask != 0).to(values.device)


def _picked(values: Any, mask: Any) -> np.ndarray:
    """Return the values of the tokens that count ``[n]``, on the host."""
    return _on_host(values.reshape(-1) if mask is None else values[_like(mask, values)])


def _counts(shape: tuple[int, ...], mask: Any) -> np.ndarray:
    """Return how many tokens count of each sample of a block."""
    if mask is None:
        return np.full(shape[0] if len(shape) == 2 else 1, shape[-1], np.int64)
    return np.atleast_1d(_on_host((mask != 0).sum(-1))).astype(np.int64)


def _differ(a: Any, b: Any, mask: Any) -> Any:
    """Return for each token whether its experts differ in some layer; the order of a layer's experts says nothing.

    Only tokens whose experts differ as they come are sorted.
    """
    if _is_tensor(a) or _is_tensor(b):
        import torch

        a, b = (torch.as_tensor(values) for values in (a, b))
        a, b = (values.int() if values.dtype in (torch.uint16, torch.uint32) else values for values in (a, b))
        b = b.to(a.device)
    apart = (a != b).any(-1).any(-1)
    if mask is not None:
        apart = apart & _like(mask, a)
    one, other = (values[apart] for values in (a, b))
    if _is_tensor(a):
        one, other = one.sort(-1).values, other.sort(-1).values
    else:
        one, other = np.sort(one, -1), np.sort(other, -1)
    chosen = apart.copy() if isinstance(apart, np.ndarray) else apart.clone()
    apart[chosen] = (one != other).any(-1).any(-1)
    return apart
