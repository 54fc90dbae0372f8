"""The page of runs that go on: their files followed, the page made anew, and served locally."""
