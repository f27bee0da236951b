"""`reshard.quantization.fp8_blocks.encode` for one block within a Triton kernel."""

import triton
import triton.language as tl

from reshard.quantization import fp8_blocks

SMALLEST = tl.constexpr(fp8_blocks.SMALLEST)
MAX = tl.constexpr(fp8_blocks.E4M3_MAX)
RECIPROCAL_OF_MAX = tl.constexpr(1 / fp8_blocks.E4M3_MAX)


@triton.jit
def encode_block(value, power_of_two, divide):
    """Return the e4m3 codes of a block of fp32, and its scale, by the expressions of
    ``per_block_cast_to_fp8`` as Inductor compiles them on a GPU, where a division by a constant is
    a product, and others are not rounded to the nearest.

    Its scale is rounded up to a power of two if the scalar `power_of_two` is true. If `divide` is, both are
    rounded as a CPU divides, and files have them.
    """
    largest = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), SMALLEST)
    scale = tl.where(divide, tl.div_rn(largest, MAX), largest * RECIPROCAL_OF_MAX)
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000  # the next power of two
    scale = tl.where(power_of_two, bits.to(tl.float32, bitcast=True), scale)
    factor = tl.where(divide, tl.div_rn(1.0, scale), 1.0 / scale)
    return (value * factor).to(tl.float8e4nv), scale
