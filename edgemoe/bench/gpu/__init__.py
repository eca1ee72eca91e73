"""What `edgemoe bench gpu` measures: decoding with experts in RAM and slots for some of them on a GPU.

`run.bench_gpu` measures and returns a `run.Report`; it needs torch, triton, numpy, numba and scipy only.
"""
