"""Numbers of streams chosen by an attacker, so that a server has to search long for each."""

from __future__ import annotations

from array import array

FACTOR, SLOTS, CROWD = 0x9E37_79B9_7F4A_7C15, 1 << 20, 14
# The multiples of a number return to a short arc of a circle after at most three different distances (the three-gap
# theorem). These are the distances for this factor and this arc.
STEPS = (32_411, 80_181, 112_592)


def crowded_numbers(count: int) -> array[int]:
    """Return up to 57,000 different numbers whose products with the factor of Fibonacci hashing nearly agree in the
    bits 32 to 51: a hash table that uses these bits puts all of them into neighbouring slots."""
    found, number = array("I"), 0
    while len(found) < count:
        number = next(number + step for step in STEPS if ((number + step) * FACTOR >> 32) % SLOTS < CROWD)
        found.append(number)
    return found
