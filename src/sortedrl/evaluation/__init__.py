"""From answers and their scores to numbers one can trust: estimates, intervals, comparisons."""
