"""Searches over hyperparameters and architectures: many trials of a network on one machine."""
