"""The quality harness: Hugging Face MoE models whose experts are chosen by the one `Policy`."""
