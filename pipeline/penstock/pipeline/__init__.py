"""Data pipelines on Spark.

::

    spark = session("orders")
    orders = spark.readStream.format("penstock").option(...).load()

Importing this needs no Spark: whatever needs it says so when it is used (SparkMissingError), and
where there is no Java for it (JavaMissingError).
"""

from penstock.pipeline.errors import (
    ConnectorError,
    DataLossError,
    JavaMissingError,
    OptionError,
    PipelineError,
    SparkMissingError,
)
from penstock.pipeline.session import session

__all__ = [
    "ConnectorError",
    "DataLossError",
    "JavaMissingError",
    "OptionError",
    "PipelineError",
    "SparkMissingError",
    "session",
]
