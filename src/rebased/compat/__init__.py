"""The interfaces of other libraries over our operators: code that is written for them changes one import."""
