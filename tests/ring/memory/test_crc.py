"""CRC-32C: the CPU's instruction and the table give what google_crc32c gives."""

from __future__ import annotations

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from mqfs.ring import crc32c


@given(st.binary(max_size=3000), st.integers(0, 7))
def test_any_bytes_at_any_alignment(data: bytes, skip: int) -> None:
    at = memoryview(data)[skip:]
    assert crc32c(at) == crc32c(at, 0, True) == google_crc32c.value(bytes(at))


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_goes_on_from_a_sum(first: bytes, second: bytes) -> None:
    for table in (False, True):
        assert crc32c(second, crc32c(first, 0, table), table) == google_crc32c.value(first + second)


def test_every_length_around_the_strides() -> None:
    data = bytes(i * 7 % 251 for i in range(2400))
    for size in [*range(40), *range(760, 780), *range(1530, 1545), 2400]:
        wanted = google_crc32c.value(data[:size])
        assert (crc32c(data[:size]), crc32c(data[:size], 0, True)) == (wanted, wanted), size
