"""The options of a source or sink, as Spark hands them over: text by name, in any case.

Each is asked for by the name under which it is documented, so that ``finish`` knows what nobody
asked for: an option that is mistyped is refused, not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Final

from penstock.client.config import CommonConfig, ProducerConfig
from penstock.client.errors import ConfigurationError
from penstock.pipeline.errors import OptionError
from penstock.pipeline.setting_names import PREFIX, as_options
from penstock.wire.config_keys import suggest

_MAX_INT64: Final = 2**63 - 1
_SERVERS: Final = "bootstrap.servers"
_SPARKS_OWN: Final = ("checkpointLocation", "queryName")
"""What a query hands its sink beside the sink's own options, and reads itself."""
_ITS_PRODUCERS: Final = re.compile(r"\b(?:attempt|commit) setting\b")
_KAFKA: Final = "kafka."
_SPAN: Final = re.compile(r"([0-9]{1,15})\s*(ms|s|sec|m|min|h|d|)", re.ASCII)
_UNITS_MS: Final = {
    "": 1, "ms": 1, "s": 1_000, "sec": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000,
    "d": 86_400_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings for clients, checked: what pickles, and is opened where it is used."""

    bootstrap_servers: str
    settings: Mapping[str, Any]
    """Every setting that was given, under the client's own name for it."""

    def of(self, kind: type[CommonConfig]) -> dict[str, Any]:
        """Those of them that this kind of client has."""
        names = {entry.name for entry in fields(kind)}
        return {name: value for name, value in self.settings.items() if name in names}


class OptionMap:
    """Options of one source or sink. What is wrong raises OptionError, which names the option.

    ``where`` says in messages whose options they are, such as "the penstock source". An option
    without a value (None) counts as not given.
    """

    def __init__(self, given: Mapping[str, str | None], *, where: str) -> None:
        self._where = where
        self._given: dict[str, str] = {}
        self._as_given: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._ours: Mapping[str, str] = {}
        for name, value in given.items():
            if value is None:
                continue
            low = name.lower()
            if self._given.setdefault(low, value) != value:
                raise OptionError(
                    # Without the values, which may be secrets.
                    f"{where}: {self._as_given[low]} and {name} are the same option, for case does "
                    "not count, and have different values; leave one out"
                )
            self._as_given[low] = name

    @classmethod
    def of_sink(cls, given: Mapping[str, str | None], *, where: str) -> OptionMap:
        """Those of a sink: what Spark itself adds for the query is known."""
        made = cls(given, where=where)
        for name in _SPARKS_OWN:
            made.has(name)
        return made

    def has(self, name: str) -> bool:
        """Whether it was given."""
        self._known[name.lower()] = name
        return name.lower() in self._given

    def refusal(self, name: str, why: str) -> OptionError:
        """What to raise for the value of an option; ``why`` says what is wanted."""
        value = self._given.get(name.lower())
        shown = name if value is None else f"{name}={_short(value)}"
        return OptionError(f"{self._where}: {shown}: {why}")

    def contradiction(self, why: str) -> OptionError:
        """What to raise for options that do not go together."""
        return OptionError(f"{self._where}: {why}")

    # --- values -----------------------------------------------------------------------------

    def text(self, name: str, default: str | None = None) -> str | None:
        """The text as given, without white space around it. Empty text is refused."""
        if not self.has(name):
            return default
        if not (found := self._given[name.lower()].strip()):
            raise self.refusal(name, "text is wanted; leave the option out for its default")
        return found

    def required(self, name: str, hint: str = "") -> str:
        """``text`` of an option that has no default; ``hint`` says what to write."""
        value = self.text(name)
        if value is None:
            raise OptionError(f"{self._where}: option {name} is missing{hint and '; ' + hint}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false, in any case."""
        value = self.text(name)
        return default if value is None else self._flag(name, value)

    def whole_number(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = _MAX_INT64
    ) -> int | None:
        """A whole number within these bounds; ``default`` where it is not given."""
        value = self.text(name)
        return default if value is None else self._number(name, value, low, high)

    def choice(self, name: str, allowed: Collection[str], default: str) -> str:
        """One of these words, as they are written here, given in any case."""
        value = self.text(name)
        if value is None:
            return default
        for word in allowed:
            if value.lower() == word.lower():
                return word
        raise self.refusal(name, f"one of {', '.join(allowed)} is wanted")

    def span_ms(self, name: str, default: int | None = None, *, low: int = 0) -> int | None:
        """A span of time in milliseconds, ``low`` or more: a number of them, or with a unit, as in
        500ms, 30s, 15m, 1h or 2d.
        """
        value = self.text(name)
        if value is None:
            return default
        found = _SPAN.fullmatch(value.lower())
        if found is None:
            raise self.refusal(
                name, "a number of milliseconds, or one with a unit such as 30s, 15m or 1h"
            )
        span_ms = int(found[1]) * _UNITS_MS[found[2]]
        if span_ms < low:
            raise self.refusal(name, f"at least {low}ms is wanted")
        return span_ms

    def just_one(self, *names: str) -> str:
        """Which one of these was given; none and several are refused."""
        given = [name for name in names if self.has(name)]
        if len(given) != 1:
            wanted = f"{', '.join(names[:-1])} or {names[-1]}"
            found = f"{' and '.join(given)} contradict each other" if given else "none is given"
            raise OptionError(f"{self._where}: exactly one of {wanted} is wanted; {found}")
        return given[0]

    # --- clients ----------------------------------------------------------------------------

    def client_settings(
        self,
        *kinds: type[CommonConfig],
        ours: Mapping[str, str] | None = None,
        assumed: Mapping[type[CommonConfig], Mapping[str, Any]] | None = None,
        called: Mapping[str, str] | None = None,
        prefix: str = PREFIX,
    ) -> ClientSettings:
        """What is given under ``prefix``, for clients of these kinds (ConsumerConfig, ...).

        ``penstock.bootstrap.servers`` is required. Any setting that one of the kinds has may be
        given, with dots or with underscores, and is checked as that client checks it. ``ours`` has
        settings that this source or sink sets by itself, each with what to do instead. ``assumed``
        has, by kind, what will be set where the client is made, as far as others are checked by it.
        ``called`` has settings of ours that follow from options, as messages are to call them.
        """
        servers_name = prefix + _SERVERS
        servers = self.required(servers_name, "write host:port, or several with commas")
        entries = {
            entry.name: entry for kind in kinds for entry in fields(kind) if _from_text(entry)
        }
        ours = self._ours = ours or {}
        for name in entries.keys() - ours.keys():
            self._known.setdefault(prefix + name.replace("_", "."), prefix + name.replace("_", "."))
        settings: dict[str, Any] = {}
        for low in self._given:
            setting = low.removeprefix(prefix).replace(".", "_")
            if not low.startswith(prefix) or setting == _SERVERS.replace(".", "_"):
                continue
            if setting in ours:
                raise self.refusal(self._as_given[low], ours[setting])
            if setting not in entries:
                continue  # For finish() to refuse, with all the others that nobody knows.
            self._known[low] = self._as_given[low]
            value = self._typed(low, entries[setting])
            if settings.setdefault(setting, value) != value:
                raise OptionError(
                    f"{self._where}: {prefix}{setting.replace('_', '.')} is given twice, with dots "
                    "and with underscores; leave one out"
                )
        found = ClientSettings(servers, settings)
        for kind in kinds:
            try:
                kind.load(servers, {**(assumed or {}).get(kind, {}), **found.of(kind)})
            except ConfigurationError as error:
                # The sink's producers are attempts of a group's commits, which nobody has to know.
                message = _ITS_PRODUCERS.sub("producer setting", error.message)
                why = as_options(message, prefix=prefix, other=called)
                raise OptionError(f"{self._where}, options {prefix}*: {why}") from error
        return found

    def acknowledged_settings(self, *, ours: Mapping[str, str]) -> ClientSettings:
        """``client_settings`` of a producer none of whose records may be lost in silence."""
        found = self.client_settings(ProducerConfig, ours=ours)
        if ProducerConfig.load(found.bootstrap_servers, found.of(ProducerConfig)).acks_number == 0:
            raise self.refusal(
                f"{PREFIX}acks", "nothing would be acknowledged, and rows be lost; leave it out"
            )
        return found

    def _typed(self, low: str, entry: Field[Any]) -> Any:
        name, value = self._as_given[low], self._given[low].strip()
        if "low" in entry.metadata:
            return self._number(name, value, entry.metadata["low"], entry.metadata["high"])
        return self._flag(name, value) if isinstance(entry.default, bool) else value

    # --- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Raise OptionError for what was given and nobody asked for, with the near name."""
        unknown = sorted(self._given.keys() - self._known.keys())
        if unknown:
            name = self._as_given[unknown[0]]
            setting = unknown[0].removeprefix(_KAFKA)
            if setting != unknown[0]:
                # Spark's Kafka connector has it: what is ours by that name is what was meant.
                if (why := self._ours.get(setting.replace(".", "_"))) is not None:
                    raise OptionError(f"{self._where}: unknown option {name}: {why}")
                if (ours := self._known.get(PREFIX + setting)) is not None:
                    raise OptionError(f"{self._where}: unknown option {name}; did you mean {ours}?")
            raise OptionError(f"{self._where}: unknown option {name}{self._near(unknown[0])}")

    def _near(self, low: str) -> str:
        """The known name that this one may have meant; or all of them but the clients' many."""
        near = suggest(low, list(self._known))
        for known, name in self._known.items():
            if f"{known!r}" in near:
                return f"; did you mean {name}?"
        return f"; the options are {_listed(self._known.values())}"

    def _flag(self, name: str, value: str) -> bool:
        if value.lower() not in ("true", "false"):
            raise self.refusal(name, "true or false is wanted")
        return value.lower() == "true"

    def _number(self, name: str, value: str, low: int, high: int) -> int:
        # Only digits that every reader of the option would read so.
        if re.fullmatch(r"[+-]?[0-9]{1,19}", value) is None or not low <= int(value) <= high:
            raise self.refusal(name, f"a whole number from {low} to {high} is wanted")
        return int(value)


def _from_text(entry: Field[Any]) -> bool:
    """Whether a setting can be written as an option's text."""
    if entry.name == "bootstrap" or entry.default is MISSING:
        return False
    return not callable(entry.default)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _listed(names: Iterable[str]) -> str:
    own = sorted({name for name in names if not name.startswith(PREFIX)}, key=str.lower)
    return ", ".join([*own, f"{PREFIX}{_SERVERS} and others of the client's with {PREFIX}"])
