"""edgemoe: which experts fire, how fast this machine can possibly go, and how to get there.

Importing the package costs nothing: numpy, numba, llama.cpp and torch are imported by the modules that use them.
"""

__version__ = "0.1.0"
