"""The page of runs in progress: their files followed, the page rebuilt and served locally."""
