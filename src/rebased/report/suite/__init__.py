"""The page of a suite: recall against bytes of state, places, main effects, and the runs behind each number."""

from rebased.report.suite.board import Board
from rebased.report.suite.page import suite_page

__all__ = ["Board", "suite_page"]
