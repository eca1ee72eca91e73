"""A model file without its experts: in memory, without a name, of the original's size, with holes where experts are.

llama.cpp loads it in place of the model. Nothing of it is left on a disk whatever happens, because it never was there.
"""

import mmap
import os
from types import TracebackType

from edgemoe.errors import UserError
from edgemoe.model import Model, Part, Tensor
from edgemoe.progress import Advance, no_progress

_PIECE = 1 << 23


def is_streamed(tensor: Tensor) -> bool:
    """Whether a tensor's experts are read when they are needed. Their biases are small and stay in memory."""
    return tensor.part is Part.EXPERTS and tensor.expert is None and tensor.name.endswith(".weight")


class Skeleton:
    """One anonymous file (memfd) per shard of `model`; a context manager.

    Raises `UserError` where the system has no such files, and for a model that cannot be read. `advance` is told of
    each byte copied, `dense_bytes` in all.
    """

    def __init__(self, model: Model, advance: Advance = no_progress) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("streaming needs Linux: this system has no anonymous files (memfd_create)")
        self._descriptors: list[int] = []
        try:
            for number in range(len(model.files)):
                self._copy(model, number, advance)
        except OSError as error:
            self.close()
            raise UserError(f"{model.path}: cannot be read ({error.strerror})") from None
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[str]:
        return [f"/proc/self/fd/{descriptor}" for descriptor in self._descriptors]

    def _copy(self, model: Model, number: int, advance: Advance) -> None:
        copy = os.memfd_create("edgemoe-skeleton")
        self._descriptors.append(copy)
        source = os.open(model.files[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(copy, os.fstat(source).st_size)
            for start, end in kept(model, number):
                for at in range(start, end, _PIECE):
                    data = os.pread(source, min(_PIECE, end - at), at)
                    if len(data) != min(_PIECE, end - at):
                        raise UserError(f"{model.files[number]}: ends within its tensors: download it again")
                    os.pwrite(copy, data, at)
                    os.posix_fadvise(source, at // mmap.PAGESIZE * mmap.PAGESIZE, len(data), os.POSIX_FADV_DONTNEED)
                    advance(len(data))
        finally:
            os.close(source)

    def close(self) -> None:
        """Give the memory back; llama.cpp must have finished loading."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> "Skeleton":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kept(model: Model, number: int) -> list[tuple[int, int]]:
    """The ranges of file `number` that are no experts: its header, and the tensors that every token may need."""
    tensors = sorted((t for t in model.tensors if t.file == number), key=lambda t: t.offset)
    ranges = [(0, tensors[0].offset if tensors else model.files[number].stat().st_size)]
    for tensor in tensors:
        if is_streamed(tensor) or tensor.part is Part.UNUSED or not tensor.nbytes:
            continue
        if tensor.offset - ranges[-1][1] < mmap.PAGESIZE:
            ranges[-1] = (ranges[-1][0], tensor.offset + tensor.nbytes)
        else:
            ranges.append((tensor.offset, tensor.offset + tensor.nbytes))
    return ranges


def dense_bytes(model: Model) -> int:
    """Bytes that a skeleton of this model copies."""
    return sum(end - start for number in range(len(model.files)) for start, end in kept(model, number))
