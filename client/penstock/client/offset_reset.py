"""Where a consumer begins that has no position: ``auto_offset_reset``.

``by_duration:`` and an ISO 8601 duration is KIP-1106's: so long before now, such as
``by_duration:P3D`` or ``by_duration:PT1H30M``. Days have 24 hours, as in Java; years, months and
weeks have no fixed length there and are refused.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.wire.errors import ConfigurationError

PLACES: Final = ("earliest", "latest", "none")
_BY_DURATION: Final = "by_duration:"
_DURATION: Final = re.compile(
    r"P(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,9}))?S)?)?", re.ASCII
)
_UNITS_MS: Final = (86_400_000, 3_600_000, 60_000, 1_000)


def duration_ms(policy: str) -> int | None:
    """The duration that a policy names, in milliseconds; None where it names a place."""
    if not policy.startswith(_BY_DURATION):
        return None
    matched = _DURATION.fullmatch(policy.removeprefix(_BY_DURATION))
    if matched is None or not any(matched.groups()):
        raise ConfigurationError(
            f"consumer setting auto_offset_reset={policy!r}: after 'by_duration:' a duration of "
            "ISO 8601 is wanted, in days, hours, minutes and seconds, such as P3D, PT1H or P1DT12H"
        )
    *whole, fraction = matched.groups()
    total = sum(int(count or 0) * unit for count, unit in zip(whole, _UNITS_MS, strict=True))
    return total + int((fraction or "").ljust(3, "0")[:3])


def check(policy: object) -> None:
    """Raise ConfigurationError, which says what is allowed, unless it is a policy."""
    if isinstance(policy, str) and (policy in PLACES or duration_ms(policy) is not None):
        return
    raise ConfigurationError(
        f"consumer setting auto_offset_reset={policy!r}: one of 'earliest', 'latest', 'none' or "
        "'by_duration:' and a duration of ISO 8601, such as 'by_duration:P3D', is wanted"
    )
