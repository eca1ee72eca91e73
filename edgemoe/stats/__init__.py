"""Paired comparisons and what they can and cannot tell: differences, intervals, tests, corrections."""
