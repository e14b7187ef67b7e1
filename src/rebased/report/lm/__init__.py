"""Language models over seeds: tables, figures and the part of a page about them."""
