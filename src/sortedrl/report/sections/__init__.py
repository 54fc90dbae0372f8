"""The sections of the page of runs; each function takes the runs and gives HTML."""
