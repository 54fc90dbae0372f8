"""Station 1: from the rows of a data set to the stream of prompts."""
