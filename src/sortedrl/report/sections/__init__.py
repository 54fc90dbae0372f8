"""The parts of the page of runs, each made from the runs by its own `section`."""
