"""What goes wrong in pipelines. Each message says what, where, and what to do next."""

from __future__ import annotations


class PipelineError(Exception):
    """Any of them."""


class OptionError(PipelineError, ValueError):
    """An option of a source or sink is unknown, wrong, missing, or contradicts another one."""


class DataLossError(PipelineError):
    """Records that a query was to read are gone, or never were there."""
