"""The options that most commands share, wherever on the line they stand."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.output import OutputFormat
from penstock.cli.tls_options import VARIABLES, TlsOptions, from_environment, of_command

BOOTSTRAP_VARIABLE: Final = "PENSTOCK_BOOTSTRAP"
DEFAULT_BOOTSTRAP: Final = "localhost:9092"

Bootstrap = Annotated[
    str | None,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT,...",
        help="Brokers to start from.",
        show_default=f"${BOOTSTRAP_VARIABLE}, else {DEFAULT_BOOTSTRAP}",
    ),
]
Output = Annotated[
    OutputFormat | None,
    typer.Option("--output", help="table for people, json for programs.", show_default="table"),
]
NodeConfigFile = Annotated[
    Path | None,
    # What it may not read, the node says itself, and who would have to be let.
    typer.Option(
        "--config", help="The node's settings, as TOML.", show_default=False, readable=False
    ),
]
NodeOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting that wins over file and environment; may be repeated.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a command runs with."""

    bootstrap: str
    output: OutputFormat
    tls: TlsOptions = field(default_factory=TlsOptions)

    @property
    def as_json(self) -> bool:
        """Whether data is printed as JSON."""
        return self.output is OutputFormat.JSON


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """What stood before the sub-command; what stands after it wins."""

    bootstrap: str | None = None
    output: OutputFormat | None = None
    tls: TlsOptions = field(default_factory=TlsOptions)


def resolve(ctx: typer.Context, bootstrap: str | None, output: OutputFormat | None) -> Settings:
    """The settings in force: the command's own options, then global ones, then environment.

    Raises BadParameter for text among the command's arguments that is not UTF-8.
    """
    require_text(ctx)
    before = ctx.find_object(GlobalOptions) or GlobalOptions()
    return Settings(
        bootstrap=(
            bootstrap or before.bootstrap or os.environ.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP
        ),
        output=output or before.output or OutputFormat.TABLE,
        tls=of_command(ctx).over(before.tls).over(from_environment()),
    )


def require_text(ctx: typer.Context) -> None:
    """Raise BadParameter for an argument that is text and not UTF-8. A path may be any bytes."""
    context: Any = ctx
    while context is not None:
        for parameter in context.command.params:
            value = context.params.get(parameter.name)
            for text in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(text, str) and (shown := _not_utf8(text)):
                    raise typer.BadParameter(shown, ctx=context, param=parameter)
        context = context.parent
    for variable in (BOOTSTRAP_VARIABLE, *VARIABLES.values()):
        if shown := _not_utf8(os.environ.get(variable, "")):
            raise typer.BadParameter(f"{variable}: {shown}")


def _not_utf8(text: str) -> str:
    """What is wrong with text from outside, whose bytes may be any; empty when nothing is."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        data.decode()
    except UnicodeDecodeError:
        return f"'{data.decode('utf-8', 'backslashreplace')}' is not UTF-8"
    return ""
