"""The compiled codec where the package was built with it, and else the one in pure Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.wire import intake, reference

if TYPE_CHECKING:
    from penstock.wire.intake import Claim, Intake, Places, Receipt, Stuck, first_odd
    from penstock.wire.reference import (
        ColumnsBuilder,
        RecordsBody,
        Strings,
        join_headers,
        parse_columns,
        parse_records,
        parse_records_as,
    )

    IS_COMPILED: Final[bool] = False
else:
    try:
        from penstock.wire import _codec
    except ImportError:
        _codec = None
    IS_COMPILED = _codec is not None
    ColumnsBuilder = (_codec or reference).ColumnsBuilder
    RecordsBody = (_codec or reference).RecordsBody
    parse_columns = (_codec or reference).parse_columns
    parse_records = (_codec or reference).parse_records
    parse_records_as = (_codec or reference).parse_records_as
    Claim = (_codec or intake).Claim
    Intake = (_codec or intake).Intake
    Places = (_codec or intake).Places
    Receipt = (_codec or intake).Receipt
    Stuck = (_codec or intake).Stuck
    Strings = (_codec or reference).Strings
    join_headers = (_codec or reference).join_headers
    first_odd = (_codec or intake).first_odd

__all__ = [
    "IS_COMPILED",
    "Claim",
    "ColumnsBuilder",
    "Intake",
    "Places",
    "Receipt",
    "RecordsBody",
    "Strings",
    "Stuck",
    "first_odd",
    "join_headers",
    "parse_columns",
    "parse_records",
    "parse_records_as",
]
