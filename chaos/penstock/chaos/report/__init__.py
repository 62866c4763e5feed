"""The report of a run: one page for people, with everything in it and nothing loaded from afar."""

from penstock.chaos.report.page import write_report

__all__ = ["write_report"]
