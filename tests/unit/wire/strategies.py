"""Records as hypothesis makes them, for every test of the codec."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.wire.records import RecordData

MAX_TIMESTAMP_MS = 2**63 - 1

# Mostly short, with lengths around where a varint grows by a byte.
payloads = st.one_of(
    st.none(),
    st.binary(max_size=40),
    st.sampled_from([b"x" * 63, b"y" * 64, b"z" * 8191, b"w" * 8192]),
)
timestamps = st.one_of(
    st.integers(1_600_000_000_000, 1_900_000_000_000),
    st.integers(0, MAX_TIMESTAMP_MS),
)
headers = st.lists(
    st.tuples(st.text(max_size=12), st.one_of(st.none(), st.binary(max_size=20))), max_size=4
).map(tuple)
record_data = st.builds(RecordData, timestamps, payloads, payloads, headers)
record_lists = st.lists(record_data, min_size=1, max_size=12)
