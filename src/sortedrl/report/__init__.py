"""From a run's events and numbers to pictures."""
