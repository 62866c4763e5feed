"""What the queries must have found, worked out in plain Python over the lines themselves.

It shares nothing with the queries but the numbers of what they are to find (windows, limits): no
expression of Spark, no pattern, no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

PAUSE: Final = timedelta(minutes=90)
ALERT_WINDOW: Final = timedelta(minutes=10)
ALERT_MISSING: Final = 3

Row = dict[str, Any]


class Sent(NamedTuple):
    """A line and the place in its topic that the cluster has acknowledged for it."""

    line: bytes
    partition: int
    offset: int


@dataclass
class Expected:
    """What the topics and files are to have. Rows as their JSON has them; times as datetimes."""

    requests: list[Row] = field(default_factory=list)
    dead_letters: list[Sent] = field(default_factory=list)
    minutes: list[Row] = field(default_factory=list)
    sessions: list[Row] = field(default_factory=list)
    paths: dict[str, Row] = field(default_factory=dict)
    alerts: dict[str, Row] = field(default_factory=dict)


def work_out(sent: Iterable[Sent], lateness: timedelta) -> Expected:
    """All of it: of minutes and sessions those that ended ``lateness`` before the last request."""
    found = Expected()
    for one in sent:
        request = read_line(one)
        if request is None:
            found.dead_letters.append(one)
        else:
            found.requests.append(request)
    done = max((row["time"] for row in found.requests), default=_EVER) - lateness
    found.minutes = list(_minutes(found.requests, done))
    found.sessions = [
        _session(visit)
        for visit in _visits(found.requests)
        if max(row["time"] for row in visit) + PAUSE <= done
    ]
    found.paths = _paths(found.requests)
    found.alerts = _alerts(found.requests)
    return found


_EVER: Final = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=3650)


def read_line(sent: Sent) -> Row | None:
    """The request that a line says, or None."""
    try:
        words = split_line(sent.line.decode())
        client, identity, user, when, request, status, size, referrer, agent = words
        method, target, protocol = request.split(" ")
        time = datetime.strptime(when, "%d/%b/%Y:%H:%M:%S %z").astimezone(UTC)
        is_number = len(status) == 3 and status.isdigit() and (size == "-" or size.isdigit())
    except ValueError:
        return None
    if not is_number or not all((client, identity, user, method, target, protocol)):
        return None
    return {
        "client": client,
        "user": user,
        "time": time,
        "method": method,
        "path": target.partition("?")[0],
        "status": int(status),
        "bytes": 0 if size == "-" else int(size),
        "referrer": referrer,
        "agent": agent,
        "partition": sent.partition,
        "offset": sent.offset,
    }


def split_line(line: str) -> list[str]:
    """The fields of a line: words, and what is between brackets or quotes, as it stands there.

    Raises ValueError where one does not end, or where they are not set apart by one space.
    """
    fields = []
    rest = line
    while True:
        end = {"[": "]", '"': '"'}.get(rest[:1])
        if end is None:
            word, rest = rest.partition(" ")[0], rest[len(rest.partition(" ")[0]) :]
        else:
            length = _length(rest, end)
            word, rest = rest[1:length], rest[length + 1 :]
        fields.append(word)
        if not rest:
            return fields
        if rest[0] != " ":
            raise ValueError(f"no space before {rest!r}")
        rest = rest[1:]


def _length(text: str, end: str) -> int:
    """Where the quote or bracket that the text begins with is closed."""
    at = 1
    while text[at : at + 1] != end:
        if at >= len(text):
            raise ValueError(f"{text!r} does not end")
        at += 2 if text[at] == "\\" else 1
    return at


def _minutes(requests: list[Row], done: datetime) -> Iterator[Row]:
    groups: dict[tuple[datetime, str], list[Row]] = {}
    for row in requests:
        groups.setdefault((row["time"].replace(second=0), row["path"]), []).append(row)
    for (minute, path), rows in groups.items():
        if minute + timedelta(minutes=1) <= done:
            yield {"minute": minute, "path": path, "requests": len(rows), "errors": _errors(rows)}


def _visits(requests: list[Row]) -> Iterator[list[Row]]:
    """Each client's requests, cut where it paused."""
    of_clients: dict[str, list[Row]] = {}
    for row in requests:
        of_clients.setdefault(row["client"], []).append(row)
    for rows in of_clients.values():
        visit: list[Row] = []
        for row in sorted(rows, key=lambda one: one["time"]):
            if visit and row["time"] - visit[-1]["time"] > PAUSE:
                yield visit
                visit = []
            visit.append(row)
        yield visit


def _session(visit: list[Row]) -> Row:
    in_order = sorted(visit, key=lambda one: one["offset"])
    times = [row["time"] for row in visit]
    return {
        "client": visit[0]["client"],
        "requests": len(visit),
        "errors": _errors(visit),
        "bytes": sum(row["bytes"] for row in visit),
        "begun": min(times),
        "ended": max(times),
        "landing": in_order[0]["path"],
        "exit": in_order[-1]["path"],
    }


def _paths(requests: list[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in requests:
        total = found.setdefault(
            row["path"], {"path": row["path"], "requests": 0, "errors": 0, "bytes": 0}
        )
        total["requests"] += 1
        total["errors"] += row["status"] >= 400
        total["bytes"] += row["bytes"]
    return found


def _alerts(requests: list[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    missing = [row for row in requests if row["status"] == 404]
    counts: dict[tuple[str, datetime], list[Row]] = {}
    for row in missing:
        since = row["time"].replace(minute=row["time"].minute // 10 * 10, second=0)
        counts.setdefault((row["client"], since), []).append(row)
    for (client, since), rows in counts.items():
        if len(rows) >= ALERT_MISSING:
            last = max(rows, key=lambda one: one["offset"])["path"]
            found[f"{client} {since:%Y-%m-%d %H:%M:%S}"] = {
                "client": client, "since": since, "missing": len(rows), "last": last,
            }  # fmt: skip
    return found


def _errors(rows: Iterable[Row]) -> int:
    return sum(row["status"] >= 400 for row in rows)
