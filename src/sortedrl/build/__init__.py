"""From settings to objects: the only package that names concrete classes."""
