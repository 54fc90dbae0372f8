"""Engines outside of this process's own code: answers come as streams of tokens."""
