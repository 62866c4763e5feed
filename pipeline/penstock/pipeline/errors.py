"""What goes wrong in pipelines. Each message says what, where, and after ``next:`` what to do."""

from __future__ import annotations


class PipelineError(Exception):
    """Any of them."""


class OptionError(PipelineError, ValueError):
    """An option of a source or sink is unknown, wrong, missing, or contradicts another one."""


class DataLossError(PipelineError):
    """Records that a query was to read are gone, or never were there."""


class ReadTimeoutError(PipelineError):
    """Nothing could be read for so long that the task gives up."""


class JavaMissingError(PipelineError):
    """No Java that Spark runs on was found."""


class SparkMissingError(PipelineError):
    """PySpark is not installed, or a part of what it needs."""


class SchemaError(PipelineError, ValueError):
    """The columns of a write are not those of records."""


class RowError(PipelineError, ValueError):
    """A row can be no record: its topic is null, or a header of it has no name."""


class WriteFailedError(PipelineError):
    """What a task wrote to a topic was refused, so that it cannot be committed."""


class StaleCheckpointError(PipelineError):
    """A query is to write a batch again that is older than what it has committed last."""


class SharedSinkIdError(PipelineError):
    """Two writes of one batch have the same sink id, so a replay could not tell them apart."""


class ConcurrentQueryError(PipelineError):
    """The same query, or another one with its checkpoint, has written the same batch meanwhile."""


class QueryFailedError(PipelineError):
    """A streaming query has failed."""


class TransformError(PipelineError, ValueError):
    """A transform was asked for what the records' columns cannot give, such as a missing field."""


class ConverterError(PipelineError, ValueError):
    """A schema cannot be used, or bytes are not what their schema says."""


class ConnectorError(PipelineError):
    """A system that a connector reads or writes cannot be reached, or refuses for good."""
