"""Sends metrics of a cloud through the detector, and compares its flags with what people labelled.

Exit status 0 means: every sample came back once, with the mean, the deviation and the flag that
plain Python works out. How good the flags are is printed, and drawn for one series with ``--plot``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import detect
from pyspark import cloudpickle
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.demo.report import say, start_clock
from penstock.cli.demo.stage import quiet_spark, run_in_temporary, three_nodes
from penstock.cli.installation import require_broker
from penstock.client import Consumer, Producer, TopicPartition
from penstock.pipeline.session import prepare_environment
from penstock.wire.errors import ConfigurationError, RequestTimedOutError

SAMPLE: Final = Path(__file__).resolve().parents[2] / "data" / "cloud_metrics"
LABELS: Final = "combined_windows.json"
_NEAR: Final = 1e-9
_POLL_MS: Final = 1_000
_IDLE_POLLS: Final = 60
_QUANTITIES: Final = {
    "cpu": "CPU utilization (%)",
    "request_latency": "latency of requests (unit not given)",
    "request_count": "requests in five minutes",
    "network_in": "bytes received in five minutes",
    "disk_write_bytes": "bytes written in five minutes",
    "temperature": "temperature (°F)",
    "taxi": "passengers in half an hour",
}
"""What is measured, by a part of a series' name."""
_CONSOLE: Final = Console(highlight=False)


@dataclass(frozen=True)
class Series:
    """One file: its name as the labels have it, its samples, and the windows of its anomalies."""

    name: str
    times: list[str]
    values: list[float]
    windows: list[tuple[datetime, datetime]]

    def moments(self) -> list[datetime]:
        """The times of the samples."""
        return [datetime.fromisoformat(time) for time in self.times]


def read_series(directory: Path) -> list[Series]:
    """All series of a directory in the layout of the Numenta Anomaly Benchmark.

    Raises ConfigurationError where it has no labels, or no series.
    """
    try:
        labels = json.loads((directory / LABELS).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read {directory / LABELS}: {error}; name a directory that has it, and series "
            "in directories beside it, with --data"
        ) from None
    found = []
    for path in sorted(directory.glob("*/*.csv")):
        name = path.relative_to(directory).as_posix()
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        windows = [
            (datetime.fromisoformat(begin), datetime.fromisoformat(end))
            for begin, end in labels.get(name, [])
        ]
        times = [row["timestamp"] for row in rows]
        found.append(Series(name, times, [float(row["value"]) for row in rows], windows))
    if not found:
        raise ConfigurationError(f"{directory} has no series; name another directory with --data")
    return found


def send(bootstrap: str, series: Sequence[Series]) -> None:
    """Send all samples, those of a series in order."""
    with Producer(bootstrap, compression="lz4") as producer:
        for one in series:
            for time, value in zip(one.times, one.values, strict=True):
                text = json.dumps({"time": time, "value": value})
                producer.send(detect.METRICS, value=text.encode(), key=one.name.encode())


def read_rows(bootstrap: str, topic: str) -> dict[str, list[dict[str, Any]]]:
    """What is committed in a topic that nobody writes to any more, by key and in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    with (
        Consumer(bootstrap, isolation_level="read_committed") as consumer,
        Consumer(bootstrap, isolation_level="read_uncommitted") as anything,
    ):
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = anything.end_offsets(partitions)
        idle = 0
        while any(consumer.position(one) < end for one, end in ends.items()):
            records = consumer.poll(_POLL_MS, max_records=100_000)
            idle = 0 if records else idle + 1
            if idle > _IDLE_POLLS:
                raise RequestTimedOutError(f"{topic} was not read up to {ends} in time")
            for record in records:
                found.setdefault(record.key.decode(), []).append(json.loads(record.value))
    return found


def differences(series: Series, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where rows are not what the samples say, by Python's own statistics."""
    if [row["time"] for row in rows] != series.times:
        return [f"{series.name}: {len(rows)} rows of {len(series.times)} samples, or out of order"]
    wrong = []
    for number, (row, value) in enumerate(zip(rows, series.values, strict=True)):
        before = series.values[max(0, number - detect.WINDOW) : number]
        if len(before) < detect.LEAST:
            agrees = not row["anomaly"] and not _is_number(row.get("mean"))
        else:
            mean = statistics.fmean(before)
            deviation = math.sqrt(sum((one - mean) ** 2 for one in before) / len(before))
            scale = _NEAR * (1 + abs(mean))
            margin = abs(value - mean) - detect.LIMIT * deviation
            agrees = (
                abs(row["mean"] - mean) <= scale
                and abs(row["deviation"] - deviation) <= scale
                # By a hair it may be either.
                and (row["anomaly"] == (margin > 0) or abs(margin) <= scale)
            )
        if not agrees or row["value"] != value:
            wrong.append(f"{series.name}: {series.times[number]}: {dict(row)}")
    return wrong


def _is_number(found: Any) -> bool:
    return isinstance(found, float) and not math.isnan(found)


@dataclass(frozen=True)
class Score:
    """How flags and labels of a series meet."""

    name: str
    flags: int
    right: int
    """Flags within a window."""
    windows: int
    found: int
    """Windows with a flag."""
    samples: int
    labelled: int
    """Samples within a window: to flag all there are would give this precision."""


def score(series: Series, rows: Sequence[Mapping[str, Any]]) -> Score:
    """Compare the flags of a series with its windows."""
    flagged = [moment for moment, row in zip(series.moments(), rows, strict=True) if row["anomaly"]]

    def labelled(moment: datetime) -> bool:
        return any(begin <= moment <= end for begin, end in series.windows)

    hit = [any(begin <= one <= end for one in flagged) for begin, end in series.windows]
    return Score(
        series.name,
        len(flagged),
        sum(map(labelled, flagged)),
        len(series.windows),
        sum(hit),
        len(rows),
        sum(map(labelled, series.moments())),
    )


def show(scores: Sequence[Score]) -> None:
    """A line for each series, and the figures over all of them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("series", no_wrap=True)
    for column in ("samples", "flags", "within", "windows", "found"):
        table.add_column(column, justify="right")
    for one in scores:
        name = Path(one.name).stem[:30]
        counts = (one.samples, one.flags, one.right, one.windows, one.found)
        table.add_row(name, *(f"{count:,}" for count in counts))
    _CONSOLE.print(table)
    flags, right = sum(one.flags for one in scores), sum(one.right for one in scores)
    windows, found = sum(one.windows for one in scores), sum(one.found for one in scores)
    share = sum(one.labelled for one in scores) / sum(one.samples for one in scores)
    say(
        f"precision {right / max(1, flags):.2f} ({right:,} of {flags:,} flags are within "
        f"a labelled window, as {share:.2f} of all samples are)"
    )
    say(f"recall {found / max(1, windows):.2f} ({found} of {windows} labelled windows have a flag)")


def quantity(name: str) -> str:
    """What the values of a series are, with their unit, as the axis of a drawing says it."""
    return next(
        (text for part, text in _QUANTITIES.items() if part in name), "value (unit not given)"
    )


def plot(series: Series, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a series with what was expected of it, its flags and its labelled windows."""
    try:
        import matplotlib  # noqa: PLC0415 - all else works without it.
    except ImportError:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed; next: pip install 'penstock[plot]'"
        ) from None
    matplotlib.use("agg")
    from matplotlib import dates, pyplot  # noqa: PLC0415 - see above.

    moments = series.moments()
    mean = [row["mean"] if _is_number(row.get("mean")) else math.nan for row in rows]
    reach = [
        detect.LIMIT * row["deviation"] if _is_number(row.get("deviation")) else math.nan
        for row in rows
    ]
    figure, made = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    axes: Any = made  # Its types know no moments, which it draws all the same.
    for number, (begin, end) in enumerate(series.windows):
        label = "labelled as anomalous" if number == 0 else None
        axes.axvspan(begin, end, color="#f4c95d", alpha=0.45, lw=0, label=label)
    low = [one - far for one, far in zip(mean, reach, strict=True)]
    high = [one + far for one, far in zip(mean, reach, strict=True)]
    axes.fill_between(
        moments, low, high, color="#8fb8de", alpha=0.35, lw=0,
        label=f"mean of two days ± {detect.LIMIT:.0f} deviations",
    )  # fmt: skip
    axes.plot(moments, series.values, color="#33415c", lw=0.7, label="value")
    axes.plot(moments, mean, color="#1f77b4", lw=1.2, label="mean of two days")
    flagged = [number for number, row in enumerate(rows) if row["anomaly"]]
    axes.plot(
        [moments[number] for number in flagged], [series.values[number] for number in flagged],
        "o", color="#c1121f", ms=5, mec="white", mew=0.6, label=f"flagged ({len(flagged)})",
    )  # fmt: skip
    spread = max(series.values) - min(series.values)
    bottom = min(series.values) - 0.08 * spread
    # What is counted or measured from 0 on has no room below it.
    bottom = max(0.0, bottom) if min(series.values) >= 0 else bottom
    axes.set_ylim(bottom, max(series.values) + 0.08 * spread)
    # With room for a flag on the first sample, and on the last one.
    room = (moments[-1] - moments[0]) / 100
    axes.set_xlim(moments[0] - room, moments[-1] + room)
    axes.set_title(f"Anomalies of {Path(series.name).stem}", loc="left")
    axes.set_xlabel("time of the sample, as the data have it")
    axes.set_ylabel(quantity(series.name))
    concise: Any = dates.ConciseDateFormatter
    axes.xaxis.set_major_formatter(concise(axes.xaxis.get_major_locator()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    say(f"drew {series.name} in {path}")


def run(options: argparse.Namespace, work: Path) -> bool:
    """Everything from the first node to the drawing; whether all rows are as they should be."""
    prepare_environment()
    series = read_series(options.data)
    drawn = next((one for one in series if options.series in one.name), None)
    if drawn is None:
        raise ConfigurationError(f"no series has '{options.series}' in its name; see --series")
    # Spark's workers do not find this directory.
    register: Any = cloudpickle.register_pickle_by_value
    register(detect)
    with three_nodes(work) as cluster:
        detect.make_topics(cluster.bootstrap)
        send(cluster.bootstrap, series)
        say(f"sent {sum(len(one.values) for one in series):,} samples of {len(series)} series")
        with quiet_spark("cloud-metrics", work, detect.SETTINGS) as spark:
            query = detect.start(spark, cluster.bootstrap, str(work))
            query.processAllAvailable()
            query.stop()
        say("Spark has compared each with the two days before it")
        rows = read_rows(cluster.bootstrap, detect.STATISTICS)
        flags = read_rows(cluster.bootstrap, detect.ANOMALIES)
    wrong = [line for one in series for line in differences(one, rows.get(one.name, []))]
    wrong += [
        f"{one.name}: its records in {detect.ANOMALIES} are not those that are flagged"
        for one in series
        if flags.get(one.name, []) != [row for row in rows.get(one.name, []) if row["anomaly"]]
    ]
    if wrong:
        for line in wrong[:5]:
            _CONSOLE.print(line, markup=False, soft_wrap=True)
        say(f"FAILED: {len(wrong)} differences from what plain Python works out")
        return False
    say("no sample is lost, none is there twice: Spark and plain Python agree on each")
    show([score(one, rows[one.name]) for one in series])
    if options.plot is not None:
        plot(drawn, rows[drawn.name], options.plot)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=SAMPLE, help="a directory of series")
    parser.add_argument("--series", default="latency", help="a part of the name of what is drawn")
    parser.add_argument("--plot", type=Path, help="draw it in this PNG")
    options = parser.parse_args(arguments)
    require_broker()
    start_clock()
    return run_in_temporary(lambda work: run(options, work))


if __name__ == "__main__":
    sys.exit(main())
