"""The device's part of a token as Triton kernels, with nothing for the host to do.

Read in this order. What is decided: `ranking` (top-k with the host's ties), `policy` (Algorithm 1 over one layer's
state), `state` (that state, and how it compares with the host's), `deciding` (a decode's two parts of a step, and the
copies they ask for), `device_policy` (launches), `steps` (a prompt's). What is moved: `copying`. What is computed:
`dense`, `attention`, `experts`; `chunk_attention`, `chunk_rows` and `grouped` for prompts. What comes next: `sampling`.
How one follows another: `ordering`.

Needs torch and Triton, imported only where both are installed. Nothing newer than Ampere is needed: what Hopper can do
besides is used where it is.
"""
