"""The report of an audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["CheckReport", "Finding", "Progress"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong in a store.

    Parameters
    ----------
    kind : str
        missing, orphaned, damaged, other key, unreadable, foreign, wrong row, temporary.
    path : str
        The file.
    detail : str
        What exactly.
    action : str
        What was done about it, or would be.
    left : bool
        Whether mending leaves the file where it is, because only its owner can decide about it.
    """

    kind: str
    path: str
    detail: str
    action: str
    left: bool = False


@dataclass(slots=True)
class CheckReport:
    """The result of an audit.

    Parameters
    ----------
    chunks : int
        Chunks whose file is undamaged and agrees with its row, after mending.
    nbytes : int
        Bytes of their files.
    findings : list of Finding
        What was wrong.
    remote_chunks, remote_nbytes : int
        Undamaged chunks on the remote tier and their bytes, if it was checked.
    fixed : bool
        Whether it was mended.
    """

    chunks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    fixed: bool = False
    remote_chunks: int = 0
    remote_nbytes: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """Number of findings of each kind."""
        return dict(Counter(finding.kind for finding in self.findings))

    @property
    def left(self) -> int:
        """Number of findings that were not mended."""
        return sum(finding.left or not self.fixed for finding in self.findings)
