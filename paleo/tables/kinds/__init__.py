"""Kinds of measured tables: one module each, found by folder and told apart by their headers."""
