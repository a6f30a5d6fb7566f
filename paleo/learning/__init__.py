"""Laws of learning: samples to a target by batch size, and loss by parameters and tokens."""
