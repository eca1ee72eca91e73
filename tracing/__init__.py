"""Routing traces: capture, the trace file, statistics, cache simulation, pictures.

from edgemoe.tracing import load_trace
trace = load_trace("code.npz")
"""

from edgemoe.tracing.tracefile import Trace, load_trace, save_trace

__all__ = ["Trace", "load_trace", "save_trace"]
