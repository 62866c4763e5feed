"""The source: topics as Spark's rows, in batch and in streams."""
