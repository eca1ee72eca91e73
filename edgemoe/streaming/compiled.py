"""Making the tier's native code ready before anything is loaded: the first start on a machine has to compile it."""


def ready() -> None:
    """Compile the callback and the readers, or load their machine code from disk. Raises `UserError` without ggml."""
    from edgemoe.llamacpp.hub import Hub
    from edgemoe.streaming import step

    Hub()  # names ggml's functions to the compiler
    step.callback_address()
