"""The explorer: a page that shows what two trained models predict, where they look, and what their states hold."""
