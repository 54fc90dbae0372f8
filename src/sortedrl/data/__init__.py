"""What a model is trained and evaluated on: tasks with their rewards, rows, the prompt stream."""
