"""The report of one or several runs: a self-contained HTML page and PNG curves."""

from .page import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]
