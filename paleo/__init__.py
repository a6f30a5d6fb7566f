"""Paleo predicts, before anyone buys or books a machine, how fast a neural network will train on it, and how that scales."""

__version__ = "0.1.0"
