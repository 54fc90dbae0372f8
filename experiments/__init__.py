"""The tables of docs/results.md: each is measured by one command, from one TOML file.

    python -m experiments efficiency            measure a table
    python -m experiments efficiency --resume   resume an interrupted measurement
    python -m experiments page                  write docs/results.md from the results

A table consists of trials: one run with one result file each. Finished trials survive an
interruption, so a table can be measured in several sessions.
"""
