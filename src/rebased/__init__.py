"""ReBased linear attention (arXiv 2402.10644): operator, layers, language model and MQAR lab."""

__version__ = "0.1.0"
