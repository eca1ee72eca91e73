"""A kernel's PTX: which of its memory accesses come from which argument, and what may follow what."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_REGISTER = re.compile(r"%[a-z]+\d+")
_LINE = re.compile(r"(?:@!?(?P<guard>%p\d+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<operands>.*);")


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: str
    guarded: bool

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def words(self) -> frozenset[str]:
        return frozenset(self.name.split("."))

    @property
    def address(self) -> str | None:
        """The register of what it accesses in memory."""
        found = re.search(r"\[\s*(%\w+)", self.operands)
        return found[1] if found else None


class Code:
    """The instructions of one kernel, by their number."""

    def __init__(self, ptx: str, arguments: list[str]) -> None:
        """arguments: the names of those that are no constants, in order."""
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in ptx[ptx.index("\n{") : ptx.index("\n}")].splitlines():
            line = line.split("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", line):
                self._labels[label[1]] = len(self.instructions)
            elif (found := _LINE.fullmatch(line)) and not line.startswith("."):
                self.instructions.append(Instruction(found["name"], found["operands"], bool(found["guard"])))
        self._arguments = arguments

    def accesses(self, argument: str, *kinds: str) -> list[int]:
        """The loads, stores and atomics on memory that an argument points to, whatever the way to their address."""
        parameter = re.compile(rf"\[\w+_param_{self._arguments.index(argument)}\]")
        derived: set[str] = set()
        while True:
            before = len(derived)
            for one in self.instructions:
                registers = _REGISTER.findall(one.operands)
                from_memory = one.kind in ("ld", "atom", "st", "red")
                if parameter.search(one.operands) or (not from_memory and derived & set(registers[1:])):
                    derived |= set(registers[:1])
            if len(derived) == before:
                break
        return [i for i, one in enumerate(self.instructions) if one.kind in kinds and one.address in derived]

    def reached(self, starts: Iterable[int], stop: Callable[[Instruction], bool]) -> set[int]:
        """What may run after the instructions at `starts` before anything at which to stop."""
        found: set[int] = set()
        ahead = [following for start in starts for following in self._following(start)]
        while ahead:
            at = ahead.pop()
            if at not in found and not stop(self.instructions[at]):
                found.add(at)
                ahead += self._following(at)
        return found

    def _following(self, at: int) -> list[int]:
        one = self.instructions[at]
        if one.kind in ("ret", "exit"):
            return []
        if one.kind == "bra":
            target = self._labels[one.operands.strip()]
            return [target, at + 1] if one.guarded else [target]
        return [at + 1]
