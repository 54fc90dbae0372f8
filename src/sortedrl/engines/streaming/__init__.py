"""External engines, as processes or servers: answers come as streams of tokens."""
