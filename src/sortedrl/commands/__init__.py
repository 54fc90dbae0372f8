"""One module per command: its flags, its words, what it prints. Each has a `run(arguments)`."""
