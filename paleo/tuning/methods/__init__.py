"""Tuning methods for hyperparameters, one per file; each registers itself in `paleo.tuning.base.TUNING_METHODS`."""
