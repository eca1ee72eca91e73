"""The only place that knows llama.cpp: its libraries by ctypes, sessions, and the eval-callback hub."""
