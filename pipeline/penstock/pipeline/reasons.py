"""What Spark says of a failure, without the stacks of Java and Python around it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_PYTHONS: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception): .*)")
NEXT: Final = "; next: "
"""Before what to do, in messages that know it themselves."""
MEND: Final = "mend what this names, and try again"
"""What to do where nobody knows better."""
_END: Final = "=== Streaming Query"
_STACKS: Final = ("JVM stack", "Driver stack", "at ")
_NAMED: Final = re.compile(
    r"(?<=\b[Ff]low ')[\w.]+(?=')|(?<=\bflow: ')[\w.]+(?=')|(?<=\bFlow )[\w.]+(?= )"
)
_CLASS: Final = re.compile(r"\b([A-Za-z_]\w*(?:Error|Exception)): ")
_HOPELESS: Final = frozenset(
    {"ConfigurationError", "ConverterError", "DataLossError"}
    | {"InvalidConfigError", "InvalidTopicError", "JavaMissingError", "OptionError"}
    | {"RecordTooLargeError", "RowError", "SchemaError", "SharedSinkIdError", "SparkMissingError"}
    | {"AccessForbiddenError", "StaleCheckpointError", "TransformError"}
)


def reason_of(text: str) -> str:
    """Why it failed, in a line: by Python's last exception where there is one, else by Spark."""
    lines = [line.strip() for line in text.partition(_END)[0].splitlines()]
    if (reason := pythons_reason(lines)) is not None:
        return reason
    cut = next((i for i, line in enumerate(lines) if line.startswith(_STACKS)), None)
    return " ".join(filter(None, lines[:cut]))


def pythons_reason(lines: Iterable[str]) -> str | None:
    """The last exception of Python in these lines, if any, by its class without the module."""
    found = [match[1] for line in lines if (match := _PYTHONS.fullmatch(line))]
    return found[-1] if found else None


def error_names(text: str) -> list[str]:
    """The classes of the exceptions that a reason names, in their order."""
    return _CLASS.findall(text)


def is_hopeless(reason: str) -> bool:
    """Whether trying again is in vain until somebody changes something: by the errors it names."""
    return not _HOPELESS.isdisjoint(error_names(reason))


def is_unreachable(reason: str) -> bool:
    """Whether no broker answered: an outage, or an address that is wrong. Trying again tells."""
    return "BootstrapError" in error_names(reason)


def as_written(text: str, names: Iterable[str]) -> str:
    """``text`` of Spark's with ``names`` as they are written, where it has them in lower case.

    A name counts where Spark tells of a flow. Elsewhere it is quoted from a query, where the very
    spelling may be what is wrong. One that is written in two ways stays as Spark has it.
    """
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(name.lower(), set()).add(name)
    written = {low: next(iter(ways)) for low, ways in found.items() if len(ways) == 1}
    return _NAMED.sub(lambda match: written.get(match[0].lower(), match[0]), text)
