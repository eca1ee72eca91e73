"""The demo model, its card, and held-out text of its four domains (package data)."""

DOMAINS = ("prose", "code", "math", "manuals")
