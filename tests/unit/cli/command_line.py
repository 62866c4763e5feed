"""The real command line, for texts that name commands and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from typer.main import get_command

from penstock.cli.app import app

VALUE: Final = "{}"
"""What stands in a text for a value that is put in at run time."""

_OPTION: Final = re.compile(r"(?<![\w-])--?[a-zA-Z][a-z-]*")
_NAMED: Final = re.compile(r"(?<![\w./-])penstock +(?=[a-z-])([^`\n|;]*)")
"""A command and what stands behind it, up to the end of its line, or of its quotation."""

_PROSE: Final = ("command", "demo")
"""What follows the name where no sub-command is meant."""


@cache
def _root() -> Any:
    return get_command(app)


def options_of(command: Any) -> frozenset[str]:
    """The options that one command takes, ``--help`` and the global ones among them."""
    parameters = [*command.params, *_root().params]
    names = {name for one in parameters for name in (*one.opts, *one.secondary_opts)}
    return frozenset({name for name in names if name.startswith("-")} | {"--help"})


def commands(command: Any = None) -> Iterator[Any]:
    """Every command, those with sub-commands among them."""
    command = command or _root()
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from commands(one)


def complaints(text: str) -> Iterator[str]:
    """What is wrong with the commands that ``text`` names, and with the options behind them."""
    for found in _NAMED.finditer(text):
        yield from _complaints_about(found[1].split())


def _complaints_about(words: list[str]) -> Iterator[str]:
    line = " ".join(["penstock", *words])
    if words[0].strip(".,:)") in _PROSE:
        return
    command = _root()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0).strip(".,:)")
        if name not in command.commands:
            yield f"no such command: {line}"
            return
        command = command.commands[name]
    for word in words:
        option = word.strip("[].,:)").partition("=")[0]
        if _OPTION.fullmatch(option) and option not in options_of(command):
            yield f"no option {option}: {line}"


def bare_options(text: str) -> set[str]:
    """The long options that ``text`` names behind no command."""
    return {name for name in _OPTION.findall(_NAMED.sub("", text)) if name.startswith("--")}
