"""A run as it goes, drawn on the terminal.

events -> state -> moment -> panel -> frame -> terminal

`view` is the way in. Everything before the terminal is plain data, and tested without one.
"""
