"""Laws of learning: training samples to reach a target by batch size, and loss by parameters and tokens."""
