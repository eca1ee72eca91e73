"""scipy's distribution functions, loaded when the first test needs them."""

from types import ModuleType

from edgemoe.errors import UserError


def functions() -> ModuleType:
    """`scipy.special`, which loads several times faster than `scipy.stats`; a `UserError` where scipy is missing."""
    try:
        from scipy import special
    except ImportError:
        raise UserError("statistics need scipy, which is not installed: pip install 'edgemoe[eval]'") from None
    found: ModuleType = special
    return found
