"""What is wrong with a run's numbers, and what a change would gain on the same machine."""
