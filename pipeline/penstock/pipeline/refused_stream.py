"""What a source gives Spark in place of a stream that cannot be: one that says why.

Spark's process that plans a stream hides what ``streamReader`` raises: it goes on to stop the
reader that it did not get, and fails by that. So what is wrong is said when the reader is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

P = ParamSpec("P")


class RefusedStream(DataSourceStreamReader):
    """It raises the error by whatever Spark asks first."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def initialOffset(self) -> NoReturn:  # noqa: N802 - Spark's name, as those below.
        """Raises the error."""
        raise self.error

    def latestOffset(self, start: dict[str, Any], limit: Any) -> NoReturn:  # noqa: N802 - see above.
        """Raises the error: asked first where a checkpoint says where to begin."""
        raise self.error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Raises the error: asked first where a checkpoint has a batch that is not done."""
        raise self.error

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Raises the error."""
        raise self.error


def said_later(
    make: Callable[P, DataSourceStreamReader],
) -> Callable[P, DataSourceStreamReader]:
    """For ``streamReader``: what it raises is what the query fails with."""

    @wraps(make)
    def stream_reader(*args: P.args, **kwargs: P.kwargs) -> DataSourceStreamReader:
        try:
            return make(*args, **kwargs)
        except Exception as error:
            return RefusedStream(error)

    return stream_reader
