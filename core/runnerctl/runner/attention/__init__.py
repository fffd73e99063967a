"""Paged attention: the interface into the models, and one file per backend."""
