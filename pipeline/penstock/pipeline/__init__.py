"""Data pipelines on Spark.

::

    spark = session("orders")
    orders = spark.readStream.format("penstock").option(...).load()

Importing this needs no Spark: whatever needs it says so when it is used (SparkMissingError), and
where there is no Java for it (JavaMissingError).
"""

from penstock.pipeline.errors import (
    ConcurrentQueryError,
    ConnectorError,
    ConverterError,
    DataLossError,
    JavaMissingError,
    OptionError,
    PipelineError,
    QueryFailedError,
    ReadTimeoutError,
    RowError,
    SchemaError,
    SharedSinkIdError,
    SparkMissingError,
    StaleCheckpointError,
    TransformError,
    WriteFailedError,
)
from penstock.pipeline.running import run_until_stopped, start_query
from penstock.pipeline.session import session

__all__ = [
    "ConcurrentQueryError",
    "ConnectorError",
    "ConverterError",
    "DataLossError",
    "JavaMissingError",
    "OptionError",
    "PipelineError",
    "QueryFailedError",
    "ReadTimeoutError",
    "RowError",
    "SchemaError",
    "SharedSinkIdError",
    "SparkMissingError",
    "StaleCheckpointError",
    "TransformError",
    "WriteFailedError",
    "run_until_stopped",
    "session",
    "start_query",
]
