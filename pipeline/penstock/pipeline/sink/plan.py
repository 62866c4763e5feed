"""What the driver finds out before a write, and every task of it gets."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import StructType

from penstock.pipeline.errors import OptionError
from penstock.pipeline.sink import columns
from penstock.pipeline.sink_options import Delivery, SinkOptions


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
        cls,
        given: Mapping[str, str | None],
        schema: StructType,
        *,
        overwrite: bool = False,
        stream: bool = False,
    ) -> SinkPlan:
        """Raises OptionError and SchemaError. ``overwrite`` is what a log can't do; ``stream`` says
        that the write is a query's own, which has its numbers from Spark.
        """
        if overwrite:
            raise OptionError(
                "the penstock sink: mode 'overwrite' would delete what the topic has, and a log is "
                "only appended to; next: write with mode('append')"
            )
        options = SinkOptions.load(given)
        if stream and options.transaction is not None:
            raise OptionError(
                "the penstock sink: txnAppId and txnVersion are for df.write, and a query "
                "(writeStream) has its id and the numbers of its batches from Spark; leave them out"
            )
        if not stream and options.checkpoint is not None:
            other = None
            if options.delivery is not Delivery.EXACTLY_ONCE:
                other = "is for delivery=exactly-once, and without it tells no batch from another"
            elif options.transaction is not None:
                other = "says which batch comes again, as txnAppId and txnVersion do already"
            if other is not None:
                raise OptionError(
                    f"the penstock sink: checkpointLocation {other}; leave one of them out"
                )
        names = columns.check(schema, options.topic)
        return cls(options, names, f"spark-batch-{uuid.uuid4()}")
