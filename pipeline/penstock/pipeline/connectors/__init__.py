"""Connectors beyond Spark's own that work out of the pip install: databases, object stores."""
