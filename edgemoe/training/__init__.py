"""Small OLMoE-style models: corpus, model, training loop and export; the demo model's recipe."""
