"""The policy core: logical cache, routing rules, eviction. Imports numpy and numba only."""
