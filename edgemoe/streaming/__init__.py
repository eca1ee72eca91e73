"""Run a model whose experts do not fit into RAM: they are read from the disk when stock llama.cpp needs them.

The logical cache of `edgemoe.policy` decides, inside llama.cpp's eval callback; the store here moves the bytes. Read in
this order: `skeleton` (load without experts), `store` (read slices into their place), `step` (one layer's turn in the
callback), `engine` (all of it as an `edgemoe.generation` engine).
"""
