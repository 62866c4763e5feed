"""--tls-ca, --tls-cert and --tls-key stand wherever --bootstrap may; what is nearer wins."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.settings import Bootstrap, GlobalOptions, Output, resolve
from penstock.cli.tls_options import (
    TlsCa,
    TlsCert,
    TlsKey,
    TlsOptions,
    accept_tls_options,
)


def example(seen: list[Any]) -> typer.Typer:
    """An application with one command that connects and one that does not."""
    tool = typer.Typer()

    @tool.callback()
    def _root(
        ctx: typer.Context, tls_ca: TlsCa = None, tls_cert: TlsCert = None, tls_key: TlsKey = None
    ) -> None:
        ctx.obj = GlobalOptions(tls=TlsOptions(tls_ca, tls_cert, tls_key))

    @tool.command()
    def connect(
        ctx: typer.Context,
        name: str,
        times: Annotated[int, typer.Option()] = 1,
        bootstrap: Bootstrap = None,
        output: Output = None,
    ) -> None:
        seen.append((name, times, resolve(ctx, bootstrap, output).tls.client_settings()))

    @tool.command()
    def local() -> None:
        seen.append("local")

    accept_tls_options(tool)
    return tool


@pytest.mark.parametrize(
    ("line", "environment", "wanted"),
    [
        ("connect x", {}, {}),
        ("connect x --tls-ca a", {}, {"tls_ca": "a"}),
        ("--tls-ca a connect x --times 3", {}, {"tls_ca": "a"}),
        ("connect x", {"PENSTOCK_TLS_CA": "e", "PENSTOCK_TLS_CERT": ""}, {"tls_ca": "e"}),
        (
            "--tls-ca a --tls-cert b connect x --tls-ca c",
            {"PENSTOCK_TLS_CA": "e", "PENSTOCK_TLS_KEY": "k"},
            {"tls_ca": "c", "tls_certificate": "b", "tls_key": "k"},
        ),
    ],
)
def test_what_is_nearer_wins(
    line: str, environment: dict[str, str], wanted: dict[str, str]
) -> None:
    seen: list[Any] = []
    result = CliRunner().invoke(example(seen), line.split(), env=environment)
    assert result.exit_code == 0, result.output
    assert seen == [("x", 3 if "--times" in line else 1, wanted)]


def test_a_command_that_does_not_connect_has_no_such_option() -> None:
    seen: list[Any] = []
    assert CliRunner().invoke(example(seen), ["local", "--tls-ca", "a"]).exit_code == 2
    assert CliRunner().invoke(example(seen), ["local"]).exit_code == 0
    assert seen == ["local"]


def commands(group: Any, path: str = "") -> dict[str, Any]:
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{path}{name} ")
        else:
            found[path + name] = {option.name for option in command.params}
    return found


def test_every_command_that_connects_has_them() -> None:
    options = commands(typer.main.get_command(app))
    connecting = {path for path, names in options.items() if "bootstrap" in names}
    assert {"topics list", "produce", "consume", "cluster describe"} <= connecting
    for path, names in options.items():
        assert ({"tls_ca", "tls_cert", "tls_key"} <= names) == (path in connecting), path


def test_what_is_not_text_is_refused() -> None:
    environment = {"PENSTOCK_TLS_CA": "\udcff"}
    result = CliRunner().invoke(app, ["topics", "list"], env=environment)
    assert result.exit_code == 2
    assert "PENSTOCK_TLS_CA: " in result.stderr
    assert "is not UTF-8" in result.stderr
