"""The bandwidth wall: bytes per token over bandwidth, what that makes possible, and what it would take to do better."""
