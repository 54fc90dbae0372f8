"""What shows a run to a person.

record -> page (sections, charts), trace: a run's folder, read and drawn
advice: what to change, and what the simulator predicts that it gains
live: the panel on the terminal; watch: the page, served while the run is in progress
"""
