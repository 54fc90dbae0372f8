"""SGLang as an engine: in processes of our own, or behind the URL of a running server."""
