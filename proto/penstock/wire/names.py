"""What topics and groups may be called: one rule for the nodes, which hold it, and for clients."""

from __future__ import annotations

import re
from typing import Final

from penstock.wire.errors import InvalidGroupIdError, InvalidTopicError

MAX_NAME_CHARS: Final = 249
MAX_GROUP_ID_BYTES: Final = 255
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def check_topic_name(name: str) -> None:
    """Raise InvalidTopicError, which says what is allowed, for a name that no topic can have."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InvalidTopicError(
            f"topic name {name[:MAX_NAME_CHARS]!r} is not allowed: 1 to {MAX_NAME_CHARS} letters, "
            f"digits, '.', '_' and '-', and not '.' or '..'"
        )


def check_group_id(group_id: str) -> None:
    """Raise InvalidGroupIdError, which says what is allowed, for an id that no group can have."""
    if not group_id:
        raise InvalidGroupIdError(
            f"a group id must not be empty; choose one of 1 to {MAX_GROUP_ID_BYTES} bytes"
        )
    try:
        size_bytes = len(group_id.encode())
    except UnicodeEncodeError:
        raise InvalidGroupIdError(
            f"the group id {group_id[:32]!r} is no text that UTF-8 can encode; choose another"
        ) from None
    if size_bytes > MAX_GROUP_ID_BYTES:
        raise InvalidGroupIdError(
            f"the group id {group_id[:32]!r}... has {size_bytes} bytes; {MAX_GROUP_ID_BYTES} are "
            "allowed: choose a shorter one"
        )
