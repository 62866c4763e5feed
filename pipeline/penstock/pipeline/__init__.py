"""Data pipelines on Spark."""
