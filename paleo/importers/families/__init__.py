"""Families of transformers whose configurations are read by hand: one function each, registered by its model_type."""
