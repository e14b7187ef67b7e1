"""The page of `rebased report`: results and statistics of any number of runs, beside the paper's."""

from rebased.report.synthetic.page import Lab

__all__ = ["Lab"]
