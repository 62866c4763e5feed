"""The example of metrics: its statistics, how it judges flags, and all of it on Spark."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from tests.integration.cluster import environment_without_penstock

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "pipelines" / "cloud_metrics"


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``demo`` of this example; that of another one is put back afterwards."""
    before = sys.modules.pop("demo", None)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("demo")
    del sys.modules["demo"]
    if before is not None:
        sys.modules["demo"] = before


def rows_of(metrics: ModuleType, series: Any, parts: int) -> list[dict[str, Any]]:
    """What the query has for a series that comes in so many batches."""
    detect = metrics.detect
    before = np.array([])
    rows = []
    for part in np.array_split(np.array(series.values), parts):
        mean, deviation = detect.statistics(before, part)
        before = np.concatenate([before, part])[-detect.WINDOW :]
        rows += [
            {
                "value": float(value), "mean": float(middle), "deviation": float(far),
                "anomaly": bool(abs(value - middle) > detect.LIMIT * far),
            }
            for value, middle, far in zip(part, mean, deviation, strict=True)
        ]  # fmt: skip
    return [{"time": time, **row} for time, row in zip(series.times, rows, strict=True)]


@pytest.mark.parametrize("parts", [1, 7, 50])
def test_statistics_are_those_of_plain_python_however_batches_fall(
    metrics: ModuleType, parts: int
) -> None:
    series = metrics.read_series(metrics.SAMPLE)
    assert len(series) == 2
    for one in series:
        rows = rows_of(metrics, one, parts)
        assert metrics.differences(one, rows) == []
        assert len(metrics.differences(one, [*rows[:-1], {**rows[-1], "mean": 0.0}])) == 1
        flipped = {**rows[-1], "anomaly": not rows[-1]["anomaly"]}
        assert len(metrics.differences(one, [*rows[:-1], flipped])) == 1
        assert metrics.differences(one, rows[:-1])
        assert metrics.differences(one, [*rows[:-2], rows[-1], rows[-2]])


def test_a_series_that_stands_still_is_not_flagged_and_its_first_move_is(
    metrics: ModuleType,
) -> None:
    mean, deviation = metrics.detect.statistics(np.array([]), np.array([0.1] * 600 + [0.2]))
    assert np.isnan(mean[: metrics.detect.LEAST]).all()
    assert np.nanmax(deviation) <= 1e-15
    assert abs(0.2 - mean[-1]) > metrics.detect.LIMIT * deviation[-1]


def test_flags_are_counted_against_windows(metrics: ModuleType) -> None:
    times = [f"2014-01-01 00:{minute:02}:00" for minute in range(10)]
    one = metrics.Series("x", times, [0.0] * 10, [])
    moments = one.moments()
    one.windows.extend([(moments[2], moments[4]), (moments[7], moments[8])])
    rows = [{"anomaly": number in (0, 3, 4)} for number in range(10)]
    assert metrics.score(one, rows) == metrics.Score("x", 3, 2, 2, 1, 10, 5)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("realAWSCloudwatch/elb_request_count_8c0756.csv", "requests in five minutes"),
        ("realKnownCause/ec2_request_latency_system_failure.csv", "latency of requests (unit not"),
        ("realAWSCloudwatch/ec2_cpu_utilization_5f5533.csv", "CPU utilization (%)"),
        ("somebody/else.csv", "value (unit not given)"),
    ],
)
def test_a_drawing_says_what_its_axes_are_and_what_is_in_it(
    metrics: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, axis: str
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.setattr(metrics, "say", lambda _text: None)
    times = [f"2014-01-01 00:{minute:02}:00" for minute in range(10)]
    one = metrics.Series(name, times, [float(number) for number in range(10)], [])
    moments = one.moments()
    one.windows.append((moments[2], moments[4]))
    rows = [{"mean": 1.0, "deviation": 0.1, "anomaly": number > 7} for number in range(10)]
    metrics.plot(one, rows, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert axes.get_ylabel().startswith(axis)
    assert axes.get_xlabel().startswith("time of the sample")
    assert Path(name).stem in axes.get_title(loc="left")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "labelled as anomalous",
        "mean of two days ± 5 deviations",
        "value",
        "mean of two days",
        "flagged (2)",
    ]
    # Neither is a flag at the edge cut off, nor are there values below 0.
    left, right = axes.get_xlim()
    assert right - left > (moments[-1] - moments[0]).total_seconds() / 86400
    assert axes.get_ylim()[0] == 0


@pytest.mark.timeout(500)
def test_the_example_runs_and_draws(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py", "--plot", tmp_path / "metrics.png"],
        env=environment_without_penstock()
        | {"TMPDIR": str(temporary), "MPLCONFIGDIR": str(tmp_path / "matplotlib")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no sample is lost, none is there twice" in done.stdout
    assert "recall 1.00 (5 of 5 labelled windows have a flag)" in done.stdout
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
