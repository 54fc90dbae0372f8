"""Knights and Knaves: puzzles, their solutions, and the words for them."""
