"""How a digest mixes a value and its position, in the words of 64 bits that numpy and Triton share: said here
for both.

    mixed = (value + 1) * VALUE + position * POSITION
    mixed = (mixed ^ mixed >> FIRST) * FINAL
    mixed ^ mixed >> SECOND

all modulo 2**64, with shifts that bring in zeros. The factors are the golden ratio's fraction and two odd
constants of widely used mixers (xxHash's second prime, SplitMix64's first multiplier).
"""

VALUE = 0x9E3779B97F4A7C15
POSITION = 0xC2B2AE3D27D4EB4F
FINAL = 0xBF58476D1CE4E5B9
FIRST, SECOND = 29, 32


def signed(word: int) -> int:
    """The same 64 bits as a signed number.

    >>> signed(0xFFFFFFFFFFFFFFFF), signed(5)
    (-1, 5)
    """
    return word - (1 << 64) if word >> 63 else word
