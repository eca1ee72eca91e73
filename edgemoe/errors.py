"""The one exception for mistakes that a person can cause and mend."""


class UserError(Exception):
    """One line: what was expected, what was found, what to do. The CLI prints it without a traceback and exits 2."""
