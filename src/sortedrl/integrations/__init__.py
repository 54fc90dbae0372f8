"""SortedRL inside other frameworks: one module for each, importable without the others."""
