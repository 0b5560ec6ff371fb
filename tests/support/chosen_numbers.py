"""Numbers of streams as a client chooses them that wants a server to search long for each of them."""

from __future__ import annotations

from array import array

FACTOR, SLOTS, CROWD = 0x9E37_79B9_7F4A_7C15, 1 << 20, 14
# The multiples of a number come back to a short arc of a circle after three distances at most (the three-gap theorem):
# for this factor and this arc after these.
STEPS = (32_411, 80_181, 112_592)


def crowded_numbers(count: int) -> array[int]:
    """Up to 57,000 different numbers whose products with the factor of Fibonacci hashing have nearly the same bits 32
    to 51: a table that takes its slots from there has all of them in one place."""
    found, number = array("I"), 0
    while len(found) < count:
        number = next(number + step for step in STEPS if ((number + step) * FACTOR >> 32) % SLOTS < CROWD)
        found.append(number)
    return found
