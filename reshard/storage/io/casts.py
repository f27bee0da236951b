"""Casts between dtypes of weights, also those that are held less 1, and the finite numbers that they make infinite."""

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


def stored_dtype(own: Dtype, target: Dtype | None, keeps_width: bool) -> Dtype:
    """Return the dtype in which a tensor is stored where a `target` is asked for: its own if it has whole numbers, or
    if it is never cast down (`keeps_width`) and would be."""
    if target is None or not own.floating or (keeps_width and target.size < own.size):
        return own
    return target


def overflow_notice(name: str, count: int, dtype: Dtype) -> str:
    """Return the sentence for finite numbers that a cast makes infinite."""
    numbers, are = ("number", "is") if count == 1 else ("numbers", "are")
    return f"{count:,} {numbers} of {name} {are} too large for {dtype.name} and would become infinite"


def is_exact(source: Dtype, target: Dtype) -> bool:
    """Return True if every number of one dtype is one of the other."""
    return source.name == target.name or (source.name, target.name) in EXACT


def cast(slab: np.ndarray, source: Dtype, target: Dtype, name: str = "a tensor") -> np.ndarray:
    """Return the numbers in another dtype, rounded to the nearest; numbers that both hold less 1 stay so, since adding
    1 would round some.

    Raises ReshardError, with the `name` of the tensor, if a dtype that holds them less 1 has no such number for one.
    """
    if source == target:
        return slab
    if source.less_1 and not target.less_1:
        slab = _plus_1(slab)
    if source.name != target.name:
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are weights like any other
            slab = slab.astype(target.numpy())
    return _less_1(slab, name) if target.less_1 and not source.less_1 else slab


def _less_1(slab: np.ndarray, name: str) -> np.ndarray:
    less = (slab.astype(np.float32) - 1).astype(slab.dtype)
    lost = int((_plus_1(less) != slab).sum())
    if lost:
        raise ReshardError(
            f"Megatron holds {name} less 1, and {lost:,} of its numbers have no such {slab.dtype.name} number: pass "
            f"--dtype fp32, which has them"
        )
    return less


def _plus_1(slab: np.ndarray) -> np.ndarray:
    return (slab.astype(np.float32) + 1).astype(slab.dtype)


def overflow(before: np.ndarray, after: np.ndarray, source: Dtype, target: Dtype) -> int:
    """Return how many finite numbers a cast has made infinite."""
    if source.name == target.name or target.name not in INFINITY or (source.name, target.name) in WIDENING:
        return 0
    signed, unsigned, infinity = INFINITY[target.name]
    minus = infinity | 1 << 8 * target.size - 1
    if after.view(signed).max(initial=0) < infinity and after.view(unsigned).max(initial=0) < minus:
        return 0  # two passes that make no arrays: the rule, and a tenth of the cast's time
    infinite = (after.view(unsigned) == infinity) | (after.view(unsigned) == minus)
    return int(np.isfinite(before[infinite].astype(np.float64)).sum())
