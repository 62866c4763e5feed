"""What goes wrong in pipelines. Each message says what, where, and after ``next:`` what to do."""

from __future__ import annotations


class PipelineError(Exception):
    """Any of them."""


class OptionError(PipelineError, ValueError):
    """An option of a source or sink is unknown, wrong, missing, or contradicts another one."""


class DataLossError(PipelineError):
    """Records that a query was to read are gone, or never were there."""


class JavaMissingError(PipelineError):
    """No Java that Spark runs on was found."""


class SparkMissingError(PipelineError):
    """PySpark is not installed, or a part of what it needs."""


class ConnectorError(PipelineError):
    """A system that a connector reads or writes cannot be reached, or refuses for good."""
