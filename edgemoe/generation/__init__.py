"""Text out of an engine: prompts, chat templates, sampling, stop strings, and the loop that streams it all."""
