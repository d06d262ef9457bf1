"""start_triton: whether kernels can be compiled for the GPU, before weights are loaded."""

from subprocess import SubprocessError


class CannotCompileError(Exception):
    """Triton does not work here; the message says what is missing."""


def start_triton() -> None:
    """Let Triton make what it calls CUDA with. Raises CannotCompileError where it cannot.

    It compiles that with a C compiler, into a directory from which it can be run.
    """
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    # no triton; no compiler or no driver; no libcuda; no place to write; the compiler's own failure
    except (ImportError, RuntimeError, AssertionError, OSError, SubprocessError) as error:
        raise CannotCompileError(
            f"Triton cannot compile kernels for the GPU: {error}. It needs the triton that came "
            "with torch, a C compiler (gcc or clang), and a TRITON_CACHE_DIR (default "
            "~/.triton/cache) to write to and run from"
        ) from error
