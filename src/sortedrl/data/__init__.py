"""Training and evaluation data: tasks with their rewards, rows, and the prompt stream."""
