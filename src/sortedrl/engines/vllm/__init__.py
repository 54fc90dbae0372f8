"""vLLM as an engine: in our own process, or behind the URL of a running server."""
