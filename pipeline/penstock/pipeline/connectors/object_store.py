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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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

from penstock.pipeline.connectors.writer_identity import execution_of, writer_of
from penstock.pipeline.errors import OptionError, SharedSinkIdError, StaleCheckpointError
from penstock.pipeline.option_map import OptionMap

_WHERE: Final = "the penstock-objects source"
_MARKER: Final = "_committed.json"
_PIECE_BYTES: Final = 8 << 20


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

    Under ``path`` (``bucket/prefix``) a batch has the names ``batch-0000000012/part-00000.parquet``
    and so on, and last of all ``_committed.json``, which names them: a batch without it is not
    there. A batch that comes again after a crash is written under the same names, or not at all
    where it was committed. Who reads only what is committed (as ``penstock-objects`` does) reads
    each row once. One query writes under one path, once a batch: the batches have its id, which its
    checkpoint keeps, or ``sink_id``, and those of another one are refused.
    """

    path: str
    store: S3 = field(default_factory=S3)
    compression: str = "zstd"
    sink_id: str | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch, once. Raises StaleCheckpointError where another sink has written under the
        path, or this one a later batch; SharedSinkIdError where this execution of a
        ``foreachBatch`` has written it already; OptionError without a query and ``sink_id``.
        """
        store = self.store.connect()
        sink_id, execution = writer_of(frame, self.sink_id), execution_of(frame)
        directory = self._directory(batch_id)
        if self._is_written(store, sink_id, execution, batch_id):
            return
        written = {row.name: row.rows for row in self._write(frame, directory).collect()}
        # An earlier attempt may have had more tasks: what it left is not this batch's.
        for left in _list(store, directory):
            if left.base_name not in written:
                store.delete_file(left.path)
        marker = {
            "batch": batch_id, "sink": sink_id, "execution": execution, "objects": written,
        }  # fmt: skip
        with store.open_output_stream(f"{directory}/{_MARKER}") as target:
            target.write(json.dumps(marker).encode())

    def _directory(self, batch_id: int) -> str:
        return f"{self.path.rstrip('/')}/batch-{batch_id:010d}"

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
        if _exists(store, f"{self._directory(batch_id + 1)}/{_MARKER}"):
            raise StaleCheckpointError(
                f"sink {sink_id} has written batch {batch_id + 1} under {self.path}, and batch "
                f"{batch_id} comes now: the query's checkpoint is older than what is there; "
                "nothing was written; next: use the newest checkpoint, or another path"
            )
        return True

    def _write(self, frame: DataFrame, directory: str) -> DataFrame:
        store, compression = self.store, self.compression
        schema = to_arrow_schema(frame.schema, timezone="UTC")

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            name, rows = f"part-{context.partitionId():05d}.parquet", 0
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
        )
        options.finish()
        return found

    def names(self, after: str = "") -> list[str]:
        """The Parquet objects after this one by name; of batches of ours the committed ones."""
        store = self.store.connect()
        found = sorted(each.path for each in _list(store, self.path) if each.is_file)
        committed = {path.rpartition("/")[0] for path in found if path.endswith(f"/{_MARKER}")}
        names = []
        for path in found:
            directory, _, name = path.rpartition("/")
            if not name.endswith(".parquet"):
                continue
            if directory.rpartition("/")[2].startswith("batch-") and directory not in committed:
                # Batches come one after the other: what follows is not complete either.
                break
            names.append(path)
        return [path for path in names if path > after]


class ObjectsDataSource(DataSource):
    """``format("penstock-objects")``: Parquet objects under a path, in the order of their names.

    Options: ``path``, ``endpoint``, ``region``, ``accessKey``, ``secretKey``,
    ``maxFilesPerTrigger``. Without ``.schema(...)`` the first object's is taken. A stream reads
    objects that are new, by name: each must come after those before it, as those of batches do.
    """

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-objects"

    def schema(self) -> StructType:
        """That of the first object. Raises OptionError where there is none yet."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - rarely needed.

        options = _SourceOptions.load(self.options)
        names = options.names()
        if not names:
            raise OptionError(
                f"{_WHERE}: there is no Parquet object under {options.path} to take the schema "
                "from; next: pass .schema(...)"
            )
        return from_arrow_schema(pq.read_schema(names[0], filesystem=options.store.connect()))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``: all objects."""
        return _ObjectsReader(_SourceOptions.load(self.options), schema)

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
        return [_Object(path) for path in self._options.names()]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return _read(self._options.store, partition.path, self._schema)


class _NewObjectsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: _SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._last: str | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name.
        return {"after": ""}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name.
        most = self._options.most_files
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name.
        self._last = max(self._options.names(), default="")

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's.
        names = self._options.names(start["after"])
        if self._last is not None:
            names = [name for name in names if name <= self._last]
        if isinstance(limit, ReadMaxFiles):
            names = names[: limit.max_files]
        return {"after": max(names, default=start["after"])}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        names = self._options.names(start["after"])
        return [_Object(name) for name in names if name <= end["after"]]

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


def _marker(store: fs.FileSystem, directory: str) -> dict[str, Any] | None:
    """What a batch's commit says; None where it is not committed."""
    if not _exists(store, f"{directory}/{_MARKER}"):
        return None
    with store.open_input_stream(f"{directory}/{_MARKER}") as source:
        found: dict[str, Any] = json.loads(source.read())
    return found


def _exists(store: fs.FileSystem, path: str) -> bool:
    return bool(store.get_file_info(path).is_file)
