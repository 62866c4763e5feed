"""The options that most commands share, wherever on the line they stand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from penstock.cli.output import OutputFormat

BOOTSTRAP_VARIABLE: Final = "PENSTOCK_BOOTSTRAP"
DEFAULT_BOOTSTRAP: Final = "localhost:9092"

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT,...",
        help=f"Brokers to start from; else ${BOOTSTRAP_VARIABLE}, else {DEFAULT_BOOTSTRAP}.",
        show_default=False,
    ),
]
Output = Annotated[
    OutputFormat | None,
    typer.Option(
        "--output", help="table (the default) for people, json for programs.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command runs with."""

    bootstrap: str
    output: OutputFormat

    @property
    def as_json(self) -> bool:
        """Whether data is printed as JSON."""
        return self.output is OutputFormat.JSON


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """What stood before the sub-command; what stands after it wins."""

    bootstrap: str | None = None
    output: OutputFormat | None = None


def resolve(ctx: typer.Context, bootstrap: str | None, output: OutputFormat | None) -> Settings:
    """The settings in force: the command's own options, then global ones, then environment."""
    before = ctx.find_object(GlobalOptions) or GlobalOptions()
    return Settings(
        bootstrap=(
            bootstrap or before.bootstrap or os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP
        ),
        output=output or before.output or OutputFormat.TABLE,
    )
