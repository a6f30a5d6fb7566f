"""Readers of the configurations of transformer families: one function for each, registered by its model_type."""
