"""Clients' settings in messages, under the names of the options that set them.

A client says ``max_request_size``; who runs a pipeline has written, or is to write,
``penstock.max.request.size``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Final

from penstock.client import PenstockError
from penstock.client.config import AttemptConfig, CommitConfig, ConsumerConfig, ProducerConfig
from penstock.pipeline.errors import PipelineError

PREFIX: Final = "penstock."
_NAMES: Final = {"bootstrap_servers"} | {
    entry.name
    for kind in (AttemptConfig, CommitConfig, ConsumerConfig, ProducerConfig)
    for entry in fields(kind)
}
_LONG: Final = "|".join(sorted(name for name in _NAMES if "_" in name))
# Such as "acks" and "retries" are words as well: settings where a value is written behind them.
_SHORT: Final = "|".join(sorted(name for name in _NAMES if "_" not in name))
# Neither in quotes nor in a path: there it is somebody's topic or file.
_SETTING: Final = re.compile(
    rf"(?<![\w.'\"/-])(?:(?:{_LONG})(?![\w'\"/-]|\.\w)|(?:{_SHORT})(?==))", re.ASCII
)


def as_options(text: str, *, prefix: str = PREFIX, other: Mapping[str, str] | None = None) -> str:
    """The text with settings named as options are; ``other`` has what some are called instead."""

    def option(found: re.Match[str]) -> str:
        name = found[0]
        return (other or {}).get(name) or prefix + name.replace("_", ".")

    return _SETTING.sub(option, text)


@contextmanager
def settings_as_options() -> Iterator[None]:
    """What is raised inside, and what caused it, names settings as options are named."""
    try:
        yield
    except (PenstockError, PipelineError) as raised:
        error: BaseException | None = raised
        while isinstance(error, PenstockError | PipelineError):
            error.args = tuple(
                as_options(one) if isinstance(one, str) else one for one in error.args
            )
            error = error.__cause__
        raise
