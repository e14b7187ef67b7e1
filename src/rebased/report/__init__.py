"""Records to tables, figures and HTML pages. Nothing here trains or loads weights."""
