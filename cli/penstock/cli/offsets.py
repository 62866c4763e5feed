"""`penstock offsets`: where a partition's log begins and ends, and where a time is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.connections import admin_client
from penstock.cli.output import print_json, print_table
from penstock.cli.places import TIME_HELP, expand, format_time_ms, parse_partitions, parse_time_ms
from penstock.cli.settings import Bootstrap, Output, resolve

if TYPE_CHECKING:
    from penstock.client.aio_admin import OffsetSpec

_PLACES: Final[dict[str, OffsetSpec]] = {
    "earliest": "earliest",
    "latest": "latest",
    "max-timestamp": "max_timestamp",
}

app = typer.Typer(help="Find offsets by place or time.", no_args_is_help=True)


@app.command("get")
def get(
    ctx: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            help="Topics, or some of their partitions, such as orders:0,1.",
            metavar="TOPIC[:PARTITION,...]",
        ),
    ],
    *,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="PLACE",
            help="earliest: the first offset that is there; latest: the one that the next record "
            f"gets; max-timestamp: the record with the latest time; or {TIME_HELP}: the first "
            "record of that time or later.",
        ),
    ] = "latest",
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Show an offset of each partition, with the time of the record there.

    An offset is - (null in JSON) where no record is that late, or where there is none at all.
    """
    settings = resolve(ctx, bootstrap, output)
    spec = _PLACES.get(at)
    place = parse_time_ms(at, "--at") if spec is None else spec
    wanted = [parse_partitions(name, "TOPIC") for name in names]
    with admin_client(settings) as admin:
        partitions = expand(admin, wanted)
        found = admin.list_offsets(dict.fromkeys(partitions, place))
    rows = [
        {
            "topic": entry.topic,
            "partition": entry.partition,
            "offset": found[entry].offset if found[entry].offset >= 0 else None,
            "timestamp_ms": found[entry].timestamp_ms if found[entry].timestamp_ms >= 0 else None,
        }
        for entry in partitions
    ]
    if settings.as_json:
        print_json(rows)
        return
    print_table(
        ("Topic", "Partition", "Offset", "Timestamp"),
        [
            (
                row["topic"],
                row["partition"],
                row["offset"],
                format_time_ms(found[entry].timestamp_ms),
            )
            for entry, row in zip(partitions, rows, strict=True)
        ],
        right=("Partition", "Offset"),
    )
