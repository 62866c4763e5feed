"""`penstock metrics`: what a node measures, read wherever a client can go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from penstock.cli.connections import admin_client
from penstock.cli.output import print_json, print_table
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.config_keys import MAX_INT32

_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES: Final = {r"\\": "\\", r"\n": "\n", r"\"": '"'}
_ESCAPED: Final = re.compile(r"\\[\\n\"]")
_TIMES: Final = ("_created",)
"""What the client library adds to each counter: when it began. Nobody reads that in a table."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of the text format."""

    name: str
    labels: dict[str, str]
    value: float

    @property
    def where(self) -> str:
        """The labels as one cell."""
        return ",".join(f"{key}={value}" for key, value in self.labels.items())


def metrics(
    ctx: typer.Context,
    node: Annotated[
        int | None,
        typer.Argument(
            help="Its node id.",
            metavar="[NODE]",
            min=0,
            max=MAX_INT32,
            show_default="a broker, whichever answers",
        ),
    ] = None,
    *,
    match: Annotated[
        str,
        typer.Option(
            "--match",
            metavar="REGEX",
            help="Only those with this in their name or in name{label=value}.",
        ),
    ] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="The text of Prometheus as the node gives it.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show the metrics of a node: no metrics.listen is needed.

    A broker is asked at its broker port, a controller without a broker through one.

    docs/operating/metrics.md says what each of them means.
    """
    settings = resolve(ctx, bootstrap, output)
    try:
        wanted = re.compile(match)
    except re.error as error:
        raise typer.BadParameter(f"{match!r}: {error}", param_hint="--match") from None
    with admin_client(settings) as admin:
        text = admin.read_metrics(node)
    if raw:
        typer.echo(text, nl=False)
        return
    found = [sample for sample in samples(text) if _is_wanted(sample, wanted)]
    if settings.as_json:
        print_json([_as_json(sample) for sample in found])
        return
    print_table(
        ("Metric", "Labels", "Value"),
        [(sample.name, sample.where or None, f"{sample.value:.10g}") for sample in found],
        right=("Value",),
    )


def samples(text: str) -> Iterator[Sample]:
    """The values of a text in the format of Prometheus; what is none is passed over."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.fullmatch(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        labels = {key: _plain(quoted) for key, quoted in _LABEL.findall(found[2] or "")}
        yield Sample(found[1], labels, value)


def _plain(quoted: str) -> str:
    return _ESCAPED.sub(lambda escape: _ESCAPES[escape[0]], quoted)


def _is_wanted(sample: Sample, wanted: re.Pattern[str]) -> bool:
    if sample.name.endswith(_TIMES):
        return False
    return bool(wanted.search(f"{sample.name}{{{sample.where}}}"))


def _as_json(sample: Sample) -> dict[str, Any]:
    """A value that JSON has no number for comes as text: NaN, +Inf, -Inf."""
    finite = sample.value - sample.value == 0
    value = sample.value if finite else str(sample.value)
    return {"name": sample.name, "labels": sample.labels, "value": value}
