"""The HTML report: one self-contained page about plans and timelines, predicted or measured."""

from octopipe.report.entry import Entry
from octopipe.report.page import report_html

__all__ = ["Entry", "report_html"]
