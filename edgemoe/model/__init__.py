"""What a model file says: geometry, expert byte ranges, bytes per token (GGUF and safetensors)."""
