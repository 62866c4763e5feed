# What is said of each stands in the reference.
from penstock.wire.reference import ColumnsBuilder as ColumnsBuilder
from penstock.wire.reference import RecordsBody as RecordsBody
from penstock.wire.reference import parse_columns as parse_columns
from penstock.wire.reference import parse_records as parse_records
from penstock.wire.reference import parse_records_as as parse_records_as
