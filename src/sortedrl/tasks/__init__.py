"""What a model is trained and evaluated on: rows, and the reward that belongs to them."""
