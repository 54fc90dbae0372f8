"""vLLM as an engine: in a process of our own, or behind the URL of a running server."""
