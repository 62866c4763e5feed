"""The text format of Prometheus as `penstock metrics` reads it."""

from __future__ import annotations

import math
import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.cli.metrics import Sample, _as_json, _is_wanted, samples

HARD = 'a "b"\\c\nd,e={f}'


def text() -> str:
    registry = CollectorRegistry()
    Counter("penstock_bytes", "x", ["error"], registry=registry).labels(error=HARD).inc(3)
    Gauge("penstock_free", "x", registry=registry).set(math.nan)
    seconds = Histogram("penstock_seconds", "x", buckets=(0.5,), registry=registry)
    seconds.observe(0.25)
    return generate_latest(registry).decode()


def test_what_a_node_writes_is_read_back() -> None:
    found = {(one.name, one.where): one for one in samples(text())}
    assert found["penstock_bytes_total", f"error={HARD}"] == Sample(
        "penstock_bytes_total", {"error": HARD}, 3.0
    )
    assert math.isnan(found["penstock_free", ""].value)
    assert found["penstock_seconds_bucket", "le=+Inf"].value == 1
    assert found["penstock_seconds_sum", ""].value == 0.25


def test_what_is_no_sample_is_passed_over() -> None:
    assert list(samples("# HELP x y\n\nnonsense\nx one\n{} 1\nx 1 2 3\n")) == []
    assert list(samples("x 1 1700000000000\n")) == [Sample("x", {}, 1.0)]


def test_names_and_labels_are_matched() -> None:
    sample = Sample("penstock_lag", {"topic": "orders", "group": "g"}, 1.0)
    for pattern in ("", "lag", "topic=orders", r"^penstock_lag\{topic=orders,group=g\}$"):
        assert _is_wanted(sample, re.compile(pattern)), pattern
    assert not _is_wanted(sample, re.compile("topic=clicks"))
    assert not _is_wanted(Sample("penstock_lag_created", {}, 1.0), re.compile(""))


def test_json_has_no_number_for_some_values() -> None:
    assert _as_json(Sample("x", {}, 1.5))["value"] == 1.5
    assert _as_json(Sample("x", {}, math.nan))["value"] == "nan"
    assert _as_json(Sample("x", {}, math.inf))["value"] == "inf"
