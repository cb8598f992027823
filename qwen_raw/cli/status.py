"""What is not the result: lines on stderr that begin with "# ", and a progress bar where a person looks on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qwen_raw.cli.process import tell
from qwen_raw.generation.runner import Progress


class Status:
    """Writes to stderr. `quiet`: only what is forced."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose

    def line(self, text: str, *, force: bool = False) -> None:
        """Print `# text`."""
        if force or not self.quiet:
            tell(f"# {text}")

    def detail(self, text: str) -> None:
        """Print `# text` with --verbose."""
        if self.verbose:
            self.line(text)

    @contextmanager
    def loading(self) -> Iterator[Progress | None]:
        """A progress callback that draws a bar on a terminal; None where stderr is not one, or with --quiet."""
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("# {task.description}"), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            tasks: dict[str, TaskID] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage)
                bar.update(tasks[stage], completed=done, total=total)

            yield report
