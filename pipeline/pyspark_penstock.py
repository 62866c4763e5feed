"""What Spark looks for: a module at the top, named ``pyspark_`` something, with this class."""

from penstock.pipeline.datasource import PenstockDataSource as DefaultSource

__all__ = ["DefaultSource"]
