"""Compiled code that any number of simulated worlds can share: the runtime and the kernels of one variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from qwen_raw import paths
from qwen_raw.errors import QwenRawError, UsageError
from qwen_raw.simt import run
from qwen_raw.simt.build import Builder
from qwen_raw.simt.kernel import Module, SimKernel
from qwen_raw.simt.native import Runtime
from qwen_raw.simt.toolchain import Compiler, Variant, find_compiler


@dataclass
class Library:
    """Builds and loads on demand; keep one for many worlds.

    `variant`: "plain"; "race", where every access is checked; or "address", with AddressSanitizer, which works only in
    a process started by `python -m qwen_raw.simt.run`. `source_root`: the kernels' folder, `kernel_folders`: more of
    them; `defines`: macros, "NAME" or "NAME=VALUE"; `cache_dir`: instead of the user's cache; `host_compiler`: instead
    of the one that is found.
    """

    variant: Variant = "plain"
    source_root: Path = field(default_factory=paths.cuda_src)
    kernel_folders: tuple[Path, ...] = ()
    defines: tuple[str, ...] = ()
    cache_dir: Path | None = None
    host_compiler: Compiler = field(default_factory=find_compiler)

    def __post_init__(self) -> None:
        """Raises UsageError where there is no C++17 compiler, or no sanitizer in the process."""
        if self.variant == "address" and not run.active():
            raise UsageError('sanitize="address" needs AddressSanitizer in the process: python -m qwen_raw.simt.run …')
        self._builder = Builder(
            self.variant, self.source_root, self.cache_dir, self.host_compiler, self.kernel_folders, self.defines
        )
        self.runtime = Runtime(self._builder.runtime())
        self._modules: dict[str, Module] = {}

    @property
    def compiler(self) -> str:
        """The C++ compiler's name and version."""
        return self.host_compiler.version

    def kernel(self, stem: str, name: str) -> SimKernel:
        """The entry point `name` of `stem`.cu, compiled or taken from the cache.

        Raises QwenRawError for a compile error, or a name that the file does not have.
        """
        self.load(stem)
        kernels = self._modules[stem].kernels
        if name not in kernels:
            raise QwenRawError(f"cuda_src/{stem}.cu has no kernel {name}: it has {', '.join(sorted(kernels))}")
        return kernels[name]

    def load(self, stem: str) -> None:
        """Compile and load `stem`.cu, if that has not been done."""
        if stem not in self._modules:
            self._modules[stem] = Module(self._builder.kernel(stem))

    def relative(self, text: str) -> str:
        """`text` with the source folders' paths left out."""
        for folder in (self.source_root, *self.kernel_folders):
            text = text.replace(f"{folder.resolve()}/", "")
        return text


def variant_of(race: bool, sanitize: Literal["address"] | None) -> Variant:
    """The variant that the two options name together.

    Raises UsageError if they cannot go together.
    """
    if sanitize not in (None, "address"):
        raise UsageError(f'sanitize is "address" or None, not {sanitize!r}')
    if race and sanitize:
        raise UsageError("race and sanitize exclude each other: each instruments every access")
    return "race" if race else sanitize or "plain"
