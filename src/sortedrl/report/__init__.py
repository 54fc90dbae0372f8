"""Reports of runs.

record -> page (sections, charts), trace: read a run folder and draw it
advice: what to change, with gains predicted by the simulator
live: the panel in the terminal; watch: the page, served while the run is in progress
"""
