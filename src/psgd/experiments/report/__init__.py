"""The report: one page for one or several runs, that opens anywhere, without a network."""

from psgd.experiments.report.page import write

__all__ = ["write"]
