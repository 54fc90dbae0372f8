"""A run in progress, drawn on the terminal.

events -> state -> snapshot -> panel -> frame -> terminal

`view` is the way in. Everything before the terminal is plain data, and tested without one.
"""
