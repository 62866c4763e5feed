"""What the driver finds out before a write, and every task of it gets."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import StructType

from penstock.pipeline.errors import OptionError
from penstock.pipeline.sink import columns
from penstock.pipeline.sink_options import SinkOptions


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """It pickles."""

    options: SinkOptions
    columns: tuple[str, ...]
    """The names of the columns that come, as records have them."""
    alone: str
    """The group of this write where it belongs to no query: nobody ever has it again."""

    @classmethod
    def of(
        cls, given: Mapping[str, str | None], schema: StructType, *, overwrite: bool = False
    ) -> SinkPlan:
        """Raises OptionError and SchemaError. ``overwrite`` is what a log can't do."""
        if overwrite:
            raise OptionError(
                "the penstock sink: mode 'overwrite' would delete what the topic has, and a log is "
                "only appended to; next: write with mode('append')"
            )
        options = SinkOptions.load(given)
        names = columns.check(schema, options.topic)
        return cls(options, names, f"spark-batch-{uuid.uuid4()}")
