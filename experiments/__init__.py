"""The tables of docs/results.md: each is measured by one command, from one TOML file.

    python -m experiments efficiency            measure a table
    python -m experiments efficiency --resume   go on after a cut
    python -m experiments page                  write docs/results.md from the results

A table is cut into pieces. A piece is one run with one result file, so whatever was finished
before a cut stays, and what a machine is lent for can be spent piece by piece.
"""
