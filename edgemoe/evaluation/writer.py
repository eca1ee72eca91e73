"""Writing a result file while it grows: an interrupted evaluation goes on where it stopped.

`OUT.partial` is the `edgemoe.evaluation.journal` of the run: a line with the header and then a line per finished item.
`finish` writes OUT in one step and takes the partial file away.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from edgemoe.errors import UserError
from edgemoe.evaluation.journal import Journal
from edgemoe.evaluation.results import DAMAGE, PARTIAL, Header, Item, Results, check_item
from edgemoe.files import parse_json, whole_file
from edgemoe.tracing.texts import Source


def partial_path(out: Path) -> Path:
    """Where the items of a run to `out` are until it is finished."""
    return out.with_name(out.name + PARTIAL)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise `UserError` where a file is there that nobody said to replace."""
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists already: choose another name, or give --overwrite")


def refuse_input(out: Path, sources: Sequence[Source]) -> None:
    """Raise `UserError` where a file would be written over a text that the run reads."""
    for source in sources:
        if out.exists() and source.path.exists() and out.samefile(source.path):
            raise UserError(f"{out}: is one of the texts: choose another name")


class ResultWriter:
    """Takes the items of one evaluation as they are finished; a context manager.

        with ResultWriter(out, header) as writer:
            for question in questions:
                if not writer.has(task, question.id):
                    writer.add(Item(task, question.id, {"acc": 1}))
            results = writer.finish()

    What an earlier run with the very same header left is taken over. Raises `UserError` where `out` exists already
    (unless `overwrite`), cannot be written, is being written by another run, or was begun under another header; with
    `overwrite` such a beginning is dropped, too.
    """

    def __init__(self, out: str | Path, header: Header, overwrite: bool = False) -> None:
        self.out, self.header = Path(out), header
        self._like: dict[str, Item] = {}
        self._items: dict[tuple[str, str], Item] = {}
        if self.out.is_dir():
            raise UserError(f"{self.out}: a folder, expected a file to write, like {self.out / 'results.json'}")
        refuse_existing(self.out, overwrite)
        self._journal = Journal(partial_path(self.out))
        try:
            refuse_existing(self.out, overwrite)  # another run may have finished while this one waited for the disk
            self._resume(overwrite)
        except BaseException:
            self.close()
            raise
        self.resumed = len(self._items)
        """Items that an earlier run had finished."""

    def has(self, task: str, id: str) -> bool:
        """Whether this item is finished, now or by the run that was interrupted."""
        return (task, id) in self._items

    def __len__(self) -> int:
        """Finished items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """The finished items, in the order in which they were."""
        return iter(self._items.values())

    def add(self, item: Item) -> None:
        """Keep a finished item, on disk before this returns. Raises ValueError for one that does not belong or is
        there already, `UserError` where the disk is full."""
        self._check(item)
        self._journal.add(item.as_json())
        self._keep(item)

    def finish(self) -> Results:
        """Write the result file, whole or not at all. Raises ValueError while items are missing."""
        results = Results(self.header, tuple(self._items.values()))
        try:
            with whole_file(self.out) as file:
                file.write(results.as_bytes())
        except UserError as refusal:
            raise UserError(f"{refusal}: {self._journal.kept()}") from None
        self._journal.remove()
        return results

    def close(self) -> None:
        """Let go of the partial file; what is in it stays. May be called again."""
        self._journal.close()

    def __enter__(self) -> "ResultWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, overwrite: bool) -> None:
        for at, line in enumerate(self._journal.resume(self.header.as_json(), overwrite)):
            try:
                item = Item.from_json(parse_json(line))
                self._check(item)
                self._keep(item)
            except DAMAGE:
                raise self._journal.damaged(at) from None

    def _check(self, item: Item) -> None:
        check_item(self.header, item, self._like.get(item.task, item))
        if item.key in self._items:
            raise ValueError(f"item {item.id} of {item.task} is there already")

    def _keep(self, item: Item) -> None:
        self._like.setdefault(item.task, item)
        self._items[item.key] = item
