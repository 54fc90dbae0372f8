"""The sections of the report page; each function takes the runs and returns HTML."""
