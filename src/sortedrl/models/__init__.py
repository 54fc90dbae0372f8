"""Models and tokenizers by name: from the hub, a folder, a GGUF file, or made from a spec."""
