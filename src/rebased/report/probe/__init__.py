"""Records of probes to tables, attention maps and pages."""
