"""Benchmarks: what the tiers reach, beside what the machine could do, measured in one run."""
