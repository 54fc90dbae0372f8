"""One module per command: its flags, its words, what it prints. Each has a `run(arguments)`.

`opening` is no command: it opens tasks for those that look at them.
"""
