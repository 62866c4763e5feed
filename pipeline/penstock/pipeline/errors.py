"""What pipelines raise on purpose: a message says what, where, and after ``next:`` what to do."""

from __future__ import annotations


class PipelineError(Exception):
    """The base of every error that pipelines raise on purpose."""


class JavaMissingError(PipelineError):
    """No Java that Spark runs on was found."""


class SparkMissingError(PipelineError):
    """PySpark is not installed, or a part of what it needs."""
