"""SGLang as an engine: in our own processes, or behind the URL of a running server."""
