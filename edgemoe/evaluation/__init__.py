"""What a routing policy does to a model's output: divergence, tasks, operating points, and the files they write."""
