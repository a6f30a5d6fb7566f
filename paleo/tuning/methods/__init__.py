"""Methods of tuning, one a file; each registers itself in `paleo.tuning.base.METHODS`."""
