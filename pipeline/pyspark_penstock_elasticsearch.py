"""What Spark looks for, as in pyspark_penstock: it takes one data source of each such module."""

from penstock.pipeline.connectors.elasticsearch.sink import ElasticsearchDataSource as DefaultSource

__all__ = ["DefaultSource"]
