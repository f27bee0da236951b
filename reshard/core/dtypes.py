"""Element types: one name each, and what safetensors, torch and numpy call them.

numpy has no bfloat16 or float8 of its own; `ml_dtypes` gives them, with correct rounding between all of
these.
"""

from dataclasses import dataclass, replace
from typing import Any

from reshard.core.extras import importing


@dataclass(frozen=True, slots=True)
class Dtype:
    """An element type: `name` as torch says it, `size` in bytes, `safetensors` and torch `storage` names.

    Where it is `less_1` the numbers are held less 1, as Megatron holds the weights of some norms: what is published
    is each number plus 1. `reshard.storage.io.casts.cast` goes from one to the other.
    """

    name: str
    size: int
    safetensors: str
    storage: str
    floating: bool = True
    less_1: bool = False

    def held(self, less_1: bool) -> "Dtype":
        """Return this dtype for numbers that are held less 1, or for those that are published."""
        return self if self.less_1 == less_1 else replace(self, less_1=less_1)

    def held_like(self, other: "Dtype") -> "Dtype":
        """Return this dtype for numbers that are held less 1 if those of the other are."""
        return self.held(other.less_1)

    @property
    def published(self) -> "Dtype":
        """The dtype of the numbers as they are published."""
        return self.held(False)

    def numpy(self) -> Any:
        """The numpy dtype."""
        with importing():
            import ml_dtypes
        import numpy

        return numpy.dtype(getattr(ml_dtypes, self.name, None) or self.name)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", 8, "F64", "DoubleStorage"),
        Dtype("float32", 4, "F32", "FloatStorage"),
        Dtype("float16", 2, "F16", "HalfStorage"),
        Dtype("bfloat16", 2, "BF16", "BFloat16Storage"),
        Dtype("float8_e4m3fn", 1, "F8_E4M3", "UntypedStorage"),
        Dtype("float8_e5m2", 1, "F8_E5M2", "UntypedStorage"),
        Dtype("int64", 8, "I64", "LongStorage", False),
        Dtype("int32", 4, "I32", "IntStorage", False),
        Dtype("int16", 2, "I16", "ShortStorage", False),
        Dtype("int8", 1, "I8", "CharStorage", False),
        Dtype("uint8", 1, "U8", "ByteStorage", False),
        Dtype("bool", 1, "BOOL", "BoolStorage", False),
    )
}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}
BY_STORAGE = {dtype.storage: dtype for dtype in DTYPES.values() if dtype.storage != "UntypedStorage"}
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def unknown_dtype(name: str) -> Dtype:
    """Stands for a dtype that only tensors without weights may have, such as RNG or optimizer state."""
    return Dtype(name, 0, "", "", False)


def dtype_named(name: object) -> Dtype:
    """Return the element type of a name, long (``bfloat16``, ``torch.bfloat16``) or short (``bf16``), or of a
    ``torch.dtype``. Raises KeyError."""
    name = str(name).removeprefix("torch.")
    return DTYPES[SHORT_NAMES.get(name, name)]
