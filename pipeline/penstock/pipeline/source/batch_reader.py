"""Reading what is there: ``spark.read.format("penstock")``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.pipeline.setting_names import settings_as_options
from penstock.pipeline.source.arrow_reading import Slice, read_slice
from penstock.pipeline.source.cluster_view import ClusterView
from penstock.pipeline.source.losses import never_there
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
        with settings_as_options(), closing(ClusterView(options)) as view:
            start = view.find(options.starting or Place(everywhere=EARLIEST), "starting")
            known_ids = view.known_ids
            end = view.find(options.ending or Place(everywhere=LATEST), "ending", start)
            latest = view.latest(start)
            never_there("startingOffsets", start, latest, fail=options.fail_on_data_loss)
            never_there("endingOffsets", end, latest, fail=options.fail_on_data_loss)
            # Of partitions that were added meanwhile nobody has said where to begin.
            end = {one: min(offset, latest[one]) for one, offset in end.items() if one in latest}
            topics = view.agreed(end, known_ids)
            return slices(options, topics, start, end, topic_ids=known_ids)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The records of one task. Spark makes one without a Slice where there is nothing."""
        settle_in()
        if isinstance(partition, Slice):
            with settings_as_options():
                yield from read_slice(self._options, partition)
