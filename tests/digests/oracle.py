"""The digest in Python's whole numbers, one element after the other."""

import xxhash

MOD = 2**64


def key(counter: int) -> int:
    """splitmix64 of a counter, made odd."""
    mixed = (counter + 1) * 0x9E3779B97F4A7C15 % MOD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % MOD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % MOD
    return (mixed ^ mixed >> 31) | 1


def mixed(bits: int, size: int) -> int:
    """The mixed bits of an element of so many bytes."""
    if size <= 2:
        word = bits * 0x9E3779B1 % 2**32
        return word ^ word >> 16
    word = bits * 0x9E3779B97F4A7C15 % MOD
    return word ^ word >> 32


def number(name: str, dtype: str, shape: list[int], data: bytes) -> int:
    """The number of a tensor whose elements, row after row, are these bytes."""
    seed = xxhash.xxh3_64_intdigest(f"{name} {dtype} {shape}".encode())
    rows = shape[0] if shape else 1
    columns = 1
    for length in shape[1:]:
        columns *= length
    total = key(~seed % MOD)
    size = len(data) // (rows * columns) if rows * columns else 1
    for row in range(rows):
        for column in range(columns):
            start = (row * columns + column) * size
            bits = int.from_bytes(data[start : start + size], "little")
            total += key((seed + row) % MOD) * key(column) * mixed(bits, size)
    return total % MOD
