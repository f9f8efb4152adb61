"""What a caller asks for besides the answer, and expects."""

from __future__ import annotations

from dataclasses import dataclass

from fused_kv_llm.errors import ConfigError

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """When an answer is wanted, and what its prompt should contain.

    Parameters
    ----------
    priority : int
        Requests of a higher priority come first.
    timeout_s : float or None
        Seconds from submission after which the request is given up.
    expected : tuple of str
        Texts of chunks on which the report is to have verdicts.
    warnings : tuple of str
        What the report is to warn of, whatever becomes of the request.

    Raises
    ------
    ConfigError
        If one of them is no number, or the seconds are not positive.
    """

    priority: int = 0
    timeout_s: float | None = None
    expected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise ConfigError(f"priority={self.priority!r} is not a whole number")
        if self.timeout_s is not None and not (isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s={self.timeout_s!r} is not a positive number of seconds, or None")
