"""Messages that are well-formed protobuf and make no sense: every field may hold anything."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH = 3
_KINDS = FieldDescriptor


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.one_of(
        st.integers(max(low, -2), 9),
        st.sampled_from([low, high, high - 1, high // 2]),
        st.integers(low, high),
    )


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _KINDS.TYPE_INT32: _integers(-(2**31), 2**31 - 1),
    _KINDS.TYPE_INT64: _integers(-(2**63), 2**63 - 1),
    _KINDS.TYPE_UINT32: _integers(0, 2**32 - 1),
    _KINDS.TYPE_UINT64: _integers(0, 2**64 - 1),
    _KINDS.TYPE_FIXED32: _integers(0, 2**32 - 1),
    _KINDS.TYPE_SINT32: _integers(-(2**31), 2**31 - 1),
    _KINDS.TYPE_ENUM: _integers(-(2**31), 2**31 - 1),
    _KINDS.TYPE_BOOL: st.booleans(),
    _KINDS.TYPE_DOUBLE: st.floats(),
    _KINDS.TYPE_STRING: st.one_of(
        st.sampled_from(
            ["", ".", "..", "a", "hostile", "/", "\x00", "__consumer_offsets", "é" * 300]
        ),
        st.text(max_size=12),
    ),
    _KINDS.TYPE_BYTES: st.one_of(st.binary(max_size=20), st.binary(min_size=16, max_size=16)),
}


def absurd(kind: Descriptor, depth: int = _DEPTH) -> st.SearchStrategy[Message]:
    """Messages of a type, with fields of any value, unset ones among them."""
    fields = [field for field in kind.fields if depth > 0 or field.message_type is None]
    values = st.fixed_dictionaries({}, optional={f.name: _values(f, depth) for f in fields})
    return values.map(lambda found: _build(kind, found))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return st.dictionaries(_values(key, depth), _values(value, depth - 1), max_size=3)
    one = (
        _SCALARS[field.type]
        if field.message_type is None
        else absurd(field.message_type, depth - 1)
    )
    return st.lists(one, max_size=4) if is_repeated(field) else one


def is_repeated(field: Any) -> bool:
    """Whether a field of a message is a list or a map."""
    # Older runtimes know the label alone, and newer ones frown on it.
    return bool(
        field.is_repeated
        if hasattr(field, "is_repeated")
        else field.label == FieldDescriptor.LABEL_REPEATED
    )


def _build(kind: Descriptor, found: dict[str, Any]) -> Message:
    message: Any = GetMessageClass(kind)()
    for name, value in found.items():
        field = kind.fields_by_name[name]
        target = getattr(message, name)
        if isinstance(value, dict):
            if field.message_type.fields[1].message_type is None:
                target.update(value)
            else:
                for key, entry in value.items():
                    target[key].CopyFrom(entry)
        elif is_repeated(field):
            target.extend(value)
        elif field.message_type is not None:
            target.CopyFrom(value)
        else:
            setattr(message, name, value)
    return message
