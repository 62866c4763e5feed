"""The compiled codec where the package was built with it, and else the one in pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.wire import reference

if TYPE_CHECKING:
    from penstock.wire.reference import (
        ColumnsBuilder,
        RecordsBody,
        parse_columns,
        parse_records,
        parse_records_as,
    )

    IS_COMPILED: Final[bool] = False
else:
    try:
        from penstock.wire import _codec as chosen
    except ImportError:
        chosen = reference
    IS_COMPILED = chosen is not reference
    ColumnsBuilder = chosen.ColumnsBuilder
    RecordsBody = chosen.RecordsBody
    parse_columns = chosen.parse_columns
    parse_records = chosen.parse_records
    parse_records_as = chosen.parse_records_as

__all__ = [
    "IS_COMPILED",
    "ColumnsBuilder",
    "RecordsBody",
    "parse_columns",
    "parse_records",
    "parse_records_as",
]
