"""The device's part: Algorithm 1 and the choice of the next token as Triton kernels, with nothing for the host to do.

Read in this order: `ranking` (top-k with the host's ties), `policy` (Algorithm 1 over one layer's state), `state` (that
state, and how it compares with the host's), `device_policy` (launches), `sampling`. Needs torch and Triton, nothing
newer than Ampere; imported only where both are installed.
"""
