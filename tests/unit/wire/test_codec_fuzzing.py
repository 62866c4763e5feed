"""The compiled codec reads and writes nothing past its buffers, whatever bytes it is given."""

from __future__ import annotations

import pytest

from tests.fuzzing.__main__ import hammer, sanitiser


@pytest.mark.timeout(300)
def test_no_bytes_make_it_read_or_write_past_a_buffer() -> None:
    library = sanitiser()
    if library is None:
        pytest.skip("there is no gcc with libasan")
    result = hammer(library, rounds=500, seed=1)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "500 rounds of seed 1" in result.stdout
