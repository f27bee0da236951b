"""Casts between dtypes of weights, and the finite numbers that they make infinite."""

import numpy as np

from reshard.core.dtypes import Dtype, dtype_named
from reshard.core.errors import OptionError, ReshardError

# Infinity as an integer: as the signed one that is larger than all finite numbers' above zero.
INFINITY = {
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float32": (np.int32, np.uint32, 0x7F800000),
}
WIDENING = {("float16", "bfloat16"), ("float16", "float32"), ("bfloat16", "float32")}
# Casts that keep every number as it is.
EXACT = {("float16", "float32"), ("bfloat16", "float32")}


def float_dtype(name: object) -> Dtype | None:
    """Return the dtype of a ``--dtype``, a name or a ``torch.dtype``; None for None. Raises ReshardError for an
    unknown one."""
    if name is None:
        return None
    try:
        return {dtype.name: dtype for dtype in map(dtype_named, ("bf16", "fp16", "fp32"))}[
            dtype_named(name).name
        ]
    except KeyError as error:
        raise OptionError(f"--dtype {name!s:.40} is not one of bf16, fp16, fp32") from error


def overflow_notice(name: str, count: int, dtype: Dtype) -> str:
    """Return the sentence for finite numbers that a cast makes infinite."""
    numbers, are = ("number", "is") if count == 1 else ("numbers", "are")
    return f"{count:,} {numbers} of {name} {are} too large for {dtype.name} and would become infinite"


def is_exact(source: Dtype, target: Dtype) -> bool:
    """Return True if every number of one dtype is one of the other."""
    return source == target or (source.name, target.name) in EXACT


def cast(slab: np.ndarray, source: Dtype, target: Dtype) -> np.ndarray:
    """Return the numbers in another dtype, rounded to the nearest."""
    if source == target:
        return slab
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are weights like any other
        return slab.astype(target.numpy())


def less_one(slab: np.ndarray, name: str) -> np.ndarray:
    """Return the numbers less 1, as Megatron holds the weights of some norms.

    Raises ReshardError, naming the tensor, if adding 1 would not give back every one of them.
    """
    less = (slab.astype(np.float32) - 1).astype(slab.dtype)
    lost = int((plus_one(less) != slab).sum())
    if lost:
        raise ReshardError(
            f"Megatron holds {name} less 1, and {lost:,} of its numbers have no such {slab.dtype.name} number: pass "
            f"--dtype fp32, which has them"
        )
    return less


def plus_one(slab: np.ndarray) -> np.ndarray:
    """Return the numbers plus 1: the inverse of `less_one`."""
    return (slab.astype(np.float32) + 1).astype(slab.dtype)


def overflow(before: np.ndarray, after: np.ndarray, source: Dtype, target: Dtype) -> int:
    """Return how many finite numbers a cast has made infinite."""
    if source == target or target.name not in INFINITY or (source.name, target.name) in WIDENING:
        return 0
    signed, unsigned, infinity = INFINITY[target.name]
    minus = infinity | 1 << 8 * target.size - 1
    if after.view(signed).max(initial=0) < infinity and after.view(unsigned).max(initial=0) < minus:
        return 0  # two passes that make no arrays: the rule, and a tenth of the cast's time
    infinite = (after.view(unsigned) == infinity) | (after.view(unsigned) == minus)
    return int(np.isfinite(before[infinite].astype(np.float64)).sum())
