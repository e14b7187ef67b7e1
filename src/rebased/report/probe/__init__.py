"""Records of probes to tables, attention maps and pages."""

from rebased.report.probe.page import ProbeReport

__all__ = ["ProbeReport"]
