"""How much training a target takes: laws of samples by batch size, and of loss by parameters and tokens."""
