"""The memory and the duration of a run, computed before any weights are loaded.

dry_run     settings -> the plan below
cards       what hardware can do, and what the memory of a run depends on
memory      a run -> bytes, part by part
advice      a run that does not fit into memory -> changes that make it fit
prediction  a run -> rounds, updates, bubble, goodput and hours, from the simulator
page        all of it as lines for people, and as JSON
"""
