# What is said of each stands in the reference, and in intake.
from penstock.wire.intake import Claim as Claim
from penstock.wire.intake import Intake as Intake
from penstock.wire.intake import Places as Places
from penstock.wire.intake import Receipt as Receipt
from penstock.wire.intake import Stuck as Stuck
from penstock.wire.intake import first_odd as first_odd
from penstock.wire.reference import ColumnsBuilder as ColumnsBuilder
from penstock.wire.reference import RecordsBody as RecordsBody
from penstock.wire.reference import Strings as Strings
from penstock.wire.reference import join_headers as join_headers
from penstock.wire.reference import parse_columns as parse_columns
from penstock.wire.reference import parse_records as parse_records
from penstock.wire.reference import parse_records_as as parse_records_as
