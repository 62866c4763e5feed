"""S3-compatible object stores both ways through pyarrow: Spark's own ``s3a`` comes in jars.

::

    query.writeStream.foreachBatch(ParquetBatches("bucket/orders", s3)).start()

    spark.dataSource.register(ObjectsDataSource)
    rows = (
        spark.readStream.format("penstock-objects").schema("id bigint")
        .option("path", "bucket/orders").option("endpoint", "http://127.0.0.1:9000").load()
    )

A path is ``bucket/prefix``. Credentials come from where pyarrow's S3FileSystem takes them (the
environment, the machine's role), unless they are given.
"""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.pipeline.connectors.object_listing import (
    MARKER,
    Listing,
    Position,
    check_path,
    directory_of,
)
from penstock.pipeline.connectors.pacing import Pacing
from penstock.pipeline.connectors.repetition import check_repetition
from penstock.pipeline.connectors.writer_identity import execution_of, writer_of
from penstock.pipeline.errors import (
    ConcurrentQueryError,
    DataLossError,
    OptionError,
    SharedSinkIdError,
    StaleCheckpointError,
)
from penstock.pipeline.option_map import OptionMap
from penstock.pipeline.refused_stream import said_later
from penstock.pipeline.sink.replays import Content, plan_of

_log: Final = logging.getLogger(__name__)
_WHERE: Final = "the penstock-objects source"
_PIECE_BYTES: Final = 8 << 20
_POLL_INTERVAL_MS: Final = 1_000  # Stores take money for each listing.


@dataclass(frozen=True, slots=True)
class S3:
    """Where an object store is, and who we are there. It pickles; secrets are not shown."""

    endpoint: str | None = None
    """A URL, ``http://host:port`` or ``https://host``; without one it is Amazon's."""
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)

    def connect(self) -> fs.FileSystem:
        """Pyarrow's file system for it. Raises OptionError for an endpoint that is no URL."""
        settings: dict[str, Any] = {
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }
        if self.endpoint is not None:
            scheme, separator, host = self.endpoint.partition("://")
            if not separator or scheme not in ("http", "https") or not host:
                raise OptionError(
                    f"endpoint='{self.endpoint}' is no URL; next: write http://host:port"
                )
            settings |= {"scheme": scheme, "endpoint_override": host}
        return fs.S3FileSystem(**{name: value for name, value in settings.items() if value})


@dataclass(frozen=True, slots=True)
class ParquetBatches:
    """Connect's S3 sink: what ``foreachBatch`` calls to write each batch as Parquet objects.

    Under ``path`` (``bucket/prefix``) a batch has the names
    ``batch-0000000012/part-00000-1f0c6a52.parquet`` and so on, of which no two attempts at a task
    share one, and last of all ``_committed.json``, which names those that count: a batch without it
    is not there. A batch that comes again after a crash is written anew, or not at all where it was
    committed. Who reads only what these name (as ``penstock-objects`` does) reads each row once.
    One query writes under one path, once a batch: the batches have its id, which its checkpoint
    keeps, or ``sink_id``, and those of another one are refused.
    """

    path: str
    store: S3 = field(default_factory=S3)
    compression: str = "zstd"
    sink_id: str | None = None
    checkpoint: str | None = None
    """The query's, by which a batch that comes again is known exactly; else by its rows' number."""
    checks_replays: bool = True
    """Whether what comes under a committed number has to be what was written under it."""

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch, once. Raises StaleCheckpointError where another sink has written under the
        path, or this one a later batch or another one of that number; SharedSinkIdError where this
        execution of a ``foreachBatch`` has written it already; OptionError without a query and
        ``sink_id``.
        """
        store = self.store.connect()
        sink_id, execution = writer_of(frame, self.sink_id), execution_of(frame)
        directory, plan = self._directory(batch_id), plan_of(self.checkpoint, batch_id)
        if self._is_written(store, sink_id, execution, batch_id):
            self._check_same(store, plan, frame.count, batch_id)
            return
        written = {row.name: row.rows for row in self._write(frame, directory).collect()}
        if self._is_written(store, sink_id, execution, batch_id):
            # Meanwhile, by another driver with this checkpoint: its objects count.
            marker = _marker(store, directory) or {}
            _keep_only(store, directory, {MARKER, *marker["objects"]})
            self._check_same(store, plan, lambda: sum(written.values()), batch_id)
            return
        # Earlier attempts are not this batch's, for those who read whatever lies there.
        found = _keep_only(store, directory, written.keys())
        if gone := written.keys() - found:
            raise ConcurrentQueryError(
                f"{', '.join(sorted(gone))} of batch {batch_id} under {self.path} is gone before "
                "the batch was committed: another driver with this checkpoint writes there, too; "
                "next: let one of them run"
            )
        marker = {
            "batch": batch_id, "sink": sink_id, "execution": execution, "plan": plan,
            "objects": written,
        }  # fmt: skip
        with store.open_output_stream(f"{directory}/{MARKER}") as target:
            target.write(json.dumps(marker).encode())

    def _directory(self, batch_id: int) -> str:
        return f"{self.path.rstrip('/')}/{directory_of(batch_id)}"

    def _is_written(
        self, store: fs.FileSystem, sink_id: str, execution: str | None, batch_id: int
    ) -> bool:
        """Whether this sink has committed the batch in an earlier execution of it."""
        # The batch before tells of another writer also where that one has not come so far.
        for number in (batch_id - 1, batch_id):
            marker = _marker(store, self._directory(number)) if number >= 0 else None
            if marker is not None and marker.get("sink") != sink_id:
                raise StaleCheckpointError(
                    f"batch {number} under {self.path} was written by sink {marker.get('sink')}, "
                    f"and sink {sink_id} is to write batch {batch_id} there: the query's "
                    "checkpoint is new, or two queries write under one path; nothing was written; "
                    "next: give this query a path of its own, or the checkpoint that belongs to "
                    "what is there"
                )
        if marker is None:
            return False
        if execution is not None and marker.get("execution") == execution:
            raise SharedSinkIdError(
                f"another write of this foreachBatch has written batch {batch_id} under "
                f"{self.path} already, and this one would be taken for its repetition; nothing was "
                "written by this one; next: give it a path of its own, and start the query again"
            )
        if _exists(store, f"{self._directory(batch_id + 1)}/{MARKER}"):
            raise StaleCheckpointError(
                f"sink {sink_id} has written batch {batch_id + 1} under {self.path}, and batch "
                f"{batch_id} comes now: the query's checkpoint is older than what is there; "
                "nothing was written; next: use the newest checkpoint, or another path"
            )
        return True

    def _check_same(
        self, store: fs.FileSystem, plan: str, rows: Callable[[], int], batch_id: int
    ) -> None:
        """Raises StaleCheckpointError where what is committed under the number is another batch."""
        marker = _marker(store, self._directory(batch_id))
        if not self.checks_replays or marker is None:
            return
        before = Content(sum(marker["objects"].values()), marker.get("plan", ""))
        check_repetition(before, plan, rows, f"batch {batch_id} under {self.path}")

    def _write(self, frame: DataFrame, directory: str) -> DataFrame:
        store, compression = self.store, self.compression
        schema = to_arrow_schema(frame.schema, timezone="UTC")

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            # An attempt that was given up may still be sending when another one has been counted.
            unique = uuid.uuid4().hex[:8]
            name, rows = f"part-{context.partitionId():05d}-{unique}.parquet", 0
            # Sent when it is whole: pyarrow finishes an upload also where its writer has failed,
            # and what was torn so would lie under the name of what is right.
            with tempfile.TemporaryFile() as whole:
                with pq.ParquetWriter(whole, schema, compression=compression) as target:
                    for batch in batches:
                        target.write_batch(batch.cast(schema))
                        rows += batch.num_rows
                if rows == 0:
                    return
                whole.seek(0)
                with store.connect().open_output_stream(f"{directory}/{name}") as upload:
                    while piece := whole.read(_PIECE_BYTES):
                        upload.write(piece)
            yield pa.RecordBatch.from_pydict({
                "name": pa.array([name]), "rows": pa.array([rows], pa.int64()),
            })  # fmt: skip

        return frame.mapInArrow(write, "name string, rows bigint")


@dataclass(frozen=True, slots=True)
class _SourceOptions:
    path: str
    store: S3
    most_files: int | None
    fails: bool
    poll_interval_ms: int

    @classmethod
    def load(cls, given: Mapping[str, str]) -> _SourceOptions:
        options = OptionMap(given, where=_WHERE)
        found = cls(
            options.required("path", "as in bucket/prefix").rstrip("/"),
            S3(
                options.text("endpoint"),
                options.text("region"),
                options.text("accessKey"),
                options.text("secretKey"),
            ),
            options.whole_number("maxFilesPerTrigger", low=1),
            options.flag("failOnDataLoss", True),
            options.span_ms("pollInterval", _POLL_INTERVAL_MS) or 0,
        )
        options.finish()
        check_path(found.path, _WHERE)
        return found

    def listing(self) -> Listing:
        """What there is now. Raises OptionError for a path that has paths of batches below."""
        found = _list(self.store.connect(), self.path)
        return Listing.of((each.path.removeprefix(f"{self.path}/") for each in found), _WHERE)

    def parts_of(self, batch_id: int) -> list[str] | None:
        """What a batch consists of; None where it is not committed."""
        marker = _marker(self.store.connect(), f"{self.path}/{directory_of(batch_id)}")
        return None if marker is None else list(marker["objects"])

    def all_objects(self) -> list[str]:
        """The paths of all objects that are there to read now."""
        lost, listing = _Losses(self), self.listing()
        end = listing.plan(Position(), None, self.parts_of, lost)
        return self.paths(listing.between(Position(), end, self.parts_of, lost))

    def paths(self, names: Sequence[str]) -> list[str]:
        """As the store has them."""
        return [f"{self.path}/{name}" for name in names]


class _Losses:
    """What is done with what will never be read: the query fails, or the log says it, once."""

    def __init__(self, options: _SourceOptions) -> None:
        self._options = options
        self._told: set[str] = set()

    def __call__(self, what: str) -> None:
        text = f"{_WHERE}: under {self._options.path} {what}"
        if self._options.fails:
            raise DataLossError(
                f"{text}; next: put that right, or go on without it by failOnDataLoss=false"
            )
        if what not in self._told:
            _log.warning("%s", text)
        self._told.add(what)


class ObjectsDataSource(DataSource):
    """``format("penstock-objects")``: Parquet objects under a path.

    These are the batches of ``ParquetBatches`` that are committed, in their order, and any others,
    in the order of their names; of these a stream reads those whose names are after what it has
    read. What it would never read fails it, unless ``failOnDataLoss`` is false. Other options:
    ``path``, ``endpoint``, ``region``, ``accessKey``, ``secretKey``, ``maxFilesPerTrigger``, and
    ``pollInterval`` (1s: so long an idle stream waits until it lists the objects again).
    Without ``.schema(...)`` the first object's is taken.
    """

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-objects"

    def schema(self) -> StructType:
        """That of the first object. Raises OptionError where there is none yet."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - rarely needed.

        options = _SourceOptions.load(self.options)
        names = options.all_objects()
        if not names:
            raise OptionError(
                f"{_WHERE}: there is no Parquet object under {options.path} to take the schema "
                "from; next: pass .schema(...)"
            )
        return from_arrow_schema(pq.read_schema(names[0], filesystem=options.store.connect()))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``: all objects."""
        return _ObjectsReader(_SourceOptions.load(self.options), schema)

    @said_later
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's.
        """For ``spark.readStream``: objects that are new."""
        return _NewObjectsReader(_SourceOptions.load(self.options), schema)


@dataclass(frozen=True, slots=True)
class _Object(InputPartition):
    path: str


class _ObjectsReader(DataSourceReader):
    def __init__(self, options: _SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [_Object(path) for path in self._options.all_objects()]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return _read(self._options.store, partition.path, self._schema)


class _NewObjectsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: _SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._lost = _Losses(options)
        self._bound: Listing | None = None
        self._pacing = Pacing(options.poll_interval_ms)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name.
        return Position().offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name.
        most = self._options.most_files
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name.
        self._bound = self._options.listing()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's.
        self._pacing.wait()
        listing, most = self._options.listing(), None
        if self._bound is not None:
            listing = listing.within(self._bound)
        if isinstance(limit, ReadMaxFiles):
            most = limit.max_files
        end = listing.plan(Position.of(start), most, self._options.parts_of, self._lost).offset
        self._pacing.answered(is_new=end != start)
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        names = self._options.listing().between(
            Position.of(start), Position.of(end), self._options.parts_of, self._lost
        )
        return [_Object(path) for path in self._options.paths(names)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return _read(self._options.store, partition.path, self._schema)


def _read(store: S3, path: str, schema: StructType) -> Iterator[pa.RecordBatch]:
    wanted = to_arrow_schema(schema, timezone="UTC")
    with pq.ParquetFile(path, filesystem=store.connect()) as file:
        for batch in file.iter_batches(columns=wanted.names):
            yield batch.select(wanted.names).cast(wanted)


def _list(store: fs.FileSystem, path: str) -> list[Any]:
    found: list[Any] = store.get_file_info(
        fs.FileSelector(path, recursive=True, allow_not_found=True)
    )
    return [each for each in found if each.is_file]


def _keep_only(store: fs.FileSystem, directory: str, names: Collection[str]) -> set[str]:
    """Delete what has none of these names, and return which of them are there."""
    found = {each.base_name: each.path for each in _list(store, directory)}
    for name in found.keys() - set(names):
        store.delete_file(found[name])
    return found.keys() & set(names)


def _marker(store: fs.FileSystem, directory: str) -> dict[str, Any] | None:
    """What a batch's commit says; None where it is not committed."""
    if not _exists(store, f"{directory}/{MARKER}"):
        return None
    with store.open_input_stream(f"{directory}/{MARKER}") as source:
        found: dict[str, Any] = json.loads(source.read())
    return found


def _exists(store: fs.FileSystem, path: str) -> bool:
    return bool(store.get_file_info(path).is_file)
