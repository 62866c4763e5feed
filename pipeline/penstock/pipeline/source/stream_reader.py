"""Reading on and on: ``spark.readStream.format("penstock")``.

Spark makes one of these in a process that plans the query's batches, and keeps it there, and others
where tasks read. Only the former has connections; the tasks get nothing of it but their slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.pipeline.setting_names import settings_as_options
from penstock.pipeline.source.arrow_reading import Slice, read_slice
from penstock.pipeline.source.cluster_view import ClusterView, Topic
from penstock.pipeline.source.group import commit_finished
from penstock.pipeline.source.losses import never_there
from penstock.pipeline.source.offsets import LATEST, Offsets, from_json, ids_from_json, to_json
from penstock.pipeline.source.slices import finishing, slices
from penstock.pipeline.source.stream_planner import StreamPlanner, replaced
from penstock.pipeline.source.weighing import Scale
from penstock.pipeline.source_options import Place, SourceOptions
from penstock.pipeline.worker_process import settle_in

if TYPE_CHECKING:
    import pyarrow

_PAUSE_FIRST_S: Final = 0.01
_PAUSE_MOST_S: Final = 0.1
"""An idle query with the default trigger asks again at once, more than a hundred times a second."""
_NO_LIMIT: Final = 2**63 - 1


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See above. Where a stream begins, and how far each batch goes, ``StreamPlanner`` decides."""

    def __init__(self, options: SourceOptions) -> None:
        """Raises OptionError where an option is not for streams."""
        self._options = options.for_stream()
        self._planner = StreamPlanner(self._options)
        self._made: ClusterView | None = None
        self._scale: Scale | None = None
        self._latest: Offsets | None = None
        self._topics: Mapping[str, Topic] | None = None
        self._pause_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get the options alone."""
        return {"_options": self._options}

    # --- planning ---------------------------------------------------------------------------

    @settings_as_options()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name, as those below.
        """Where a query without a checkpoint begins.

        Raises UnknownTopicOrPartitionError, OptionError and DataLossError.
        """
        place = self._options.starting or Place(everywhere=LATEST)
        found = self._view.find(place, "starting")
        if place.offsets is not None and self._options.fail_on_data_loss:
            never_there("startingOffsets", found, self._view.latest(found), fail=True)
        self._planner.begin(found, is_fixed=place.is_fixed)
        return to_json(found, self._view.known_ids)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - see above.
        """Not ReadAllAvailable: that stands for a trigger that wants no limits."""
        return ReadMaxRows(self._options.max_offsets or _NO_LIMIT)

    @settings_as_options()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - see above.
        """Take down where everything ends now, for a query that ends there."""
        self._view.topics(afresh=True)
        self._planner.end_at(self._view.ends()[1])

    @settings_as_options()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - see above.
        """Where the next batch ends; ``start`` when there is none. Raises DataLossError.

        While nothing comes this takes up to a tenth of a second.
        """
        sleep(self._pause_s)
        begin, known_ids = from_json(start), ids_from_json(start)
        self._topics, self._latest = self._view.ends(begin)
        topic_ids = _ids(self._topics)
        end = self._planner.next_end(
            begin,
            self._latest,
            topic_ids,
            known_ids=known_ids,
            earliest=self._view.earliest,
            weigh=self._weigh,
            now_ms=monotonic() * 1000,
            unlimited=isinstance(limit, ReadAllAvailable),
        )
        if end != begin:
            self._pause_s = 0.0
        else:
            self._pause_s = min(_PAUSE_MOST_S, max(_PAUSE_FIRST_S, 2 * self._pause_s))
        return to_json(end, known_ids | topic_ids)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - see above.
        """The ends of the logs, as of the last batch, for Spark's progress."""
        return None if self._latest is None else to_json(self._latest)

    @settings_as_options()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch. Raises DataLossError."""
        begin, known_ids = from_json(start), ids_from_json(end)
        # The topics that the offsets were found in, where they were: tasks notice others. A batch
        # that an earlier run has planned comes without; nothing of it is passed over for what one
        # broker, which may be behind, leaves out.
        topics = self._topics
        if topics is None:
            topics = self._view.agreed(from_json(end), known_ids)
        anew = replaced(known_ids, ids_from_json(start))
        # What was read of a topic that was made anew is no position in the one that there is.
        positions = {one: offset for one, offset in begin.items() if one.topic not in anew}
        planned = slices(self._options, topics, positions, from_json(end), topic_ids=known_ids)
        there = {
            one: begin[one] for topic in topics.values() for one in topic.partitions if one in begin
        }
        return finishing(planned, there)

    def stop(self) -> None:
        """Free the connections."""
        if self._scale is not None:
            self._scale.close()
        if self._made is not None:
            self._made.close()
        self._made = self._scale = None

    @property
    def _view(self) -> ClusterView:
        if self._made is None:
            self._made = ClusterView(self._options)
        return self._made

    def _weigh(self, start: Offsets) -> Mapping[Any, float]:
        if self._scale is None:
            self._scale = Scale(self._options)
        return self._scale.weigh(start)

    # --- in tasks ---------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The records of one task."""
        assert isinstance(partition, Slice)
        settle_in()
        wait: Callable[[], None] = commit_finished(self._options, partition)
        try:
            with settings_as_options():
                yield from read_slice(self._options, partition)
        finally:
            wait()


def _ids(topics: Mapping[str, Topic]) -> dict[str, str]:
    return {name: topic.topic_id for name, topic in topics.items()}
