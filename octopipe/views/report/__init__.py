"""The HTML report: one self-contained page about plans and timelines, predicted or measured."""

from octopipe.views.report.entry import Entry
from octopipe.views.report.notebook import notebook_html
from octopipe.views.report.page import report_html

__all__ = ["Entry", "notebook_html", "report_html"]
