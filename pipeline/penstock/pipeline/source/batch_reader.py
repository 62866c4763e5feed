"""Reading what is there: ``spark.read.format("penstock")``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.pipeline.source.arrow_reading import Slice, read_slice
from penstock.pipeline.source.cluster_view import ClusterView
from penstock.pipeline.source.losses import lost
from penstock.pipeline.source.offsets import EARLIEST, LATEST
from penstock.pipeline.source.slices import slices
from penstock.pipeline.source_options import Place, SourceOptions
from penstock.pipeline.worker_process import settle_in

if TYPE_CHECKING:
    import pyarrow


class BatchReader(DataSourceReader):
    """Where the query begins and ends is settled once, when it is planned."""

    def __init__(self, options: SourceOptions) -> None:
        """Raises OptionError where an option is not for batch queries."""
        self._options = options.for_batch()

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks. Raises UnknownTopicOrPartitionError, OptionError and DataLossError."""
        options = self._options
        with closing(ClusterView(options)) as view:
            start = view.find(options.starting or Place(everywhere=EARLIEST), "starting")
            known_ids = view.known_ids
            end = view.find(options.ending or Place(everywhere=LATEST), "ending")
            latest = view.latest(start)
            for partition, offset in latest.items():
                wanted = max(start[partition], end[partition])
                if wanted > offset:
                    lost(
                        f"partition {partition}: offset {wanted} was asked for, and what can be "
                        f"read ends at {offset}",
                        fail=options.fail_on_data_loss,
                    )
                    end[partition] = min(end[partition], offset)
            return slices(options, view.topics(), start, end, topic_ids=known_ids)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The records of one task. Spark makes one without a Slice where there is nothing."""
        settle_in()
        if isinstance(partition, Slice):
            yield from read_slice(self._options, partition)
