"""The RAM→VRAM tier: expert slots on the GPU, experts in pinned host memory, one policy with every other tier."""
