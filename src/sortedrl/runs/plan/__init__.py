"""What a run will need and take, worked out before any weights are loaded.

cards       what hardware can do
demand      what memory depends on
memory      a run -> bytes, part by part
advice      a run that does not fit into memory -> changes that make it fit
prediction  a run -> rounds, updates, bubble, goodput and hours, from the simulator
page        all of it as lines for people, and as JSON
"""
