"""Models and tokenizers: from the hub, a folder, a GGUF file, or a `tiny` spec."""
