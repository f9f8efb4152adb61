"""What a calibration found, kept beside the store: the smallest ratio that is good enough for this model and corpus."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.paths import write_atomically
from fused_kv_llm.selectors import CacheCraft, Selector, resolve_selector

from .corpus_state import CorpusState

__all__ = ["Calibration", "calibration_path", "read_calibration"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A ratio and a selector that met a target.

    Parameters
    ----------
    identity : str
        ``FusedKVEngine.fusion_identity``: another model, tenant or preprocessing needs another calibration.
    recompute_ratio : float
        The smallest ratio tried whose agreement was shown to reach the target; 1 if none was.
    selector : str
        Its selector.
    agreement : float
        Share of full prefill's greedy tokens that the fused model would have chosen too, mean over the questions.
    target_agreement : float
        What was asked for.
    questions : int
        Questions asked.
    alpha : float or None
        Scale of the overhead of chunks, for a selector that has one; None leaves it the selector's own.
    agreement_bound : float or None
        What the agreement is at least, with the confidence; None in a file of an earlier release.
    confidence : float or None
        How sure it is that the target is reached; None in a file of an earlier release.
    asked : str
        Where the questions came from: ``"given"``, or how many were made in which way.
    made_on : CorpusState or None
        The corpus and the rule; None in a file of an earlier release.
    """

    identity: str
    recompute_ratio: float
    selector: str
    agreement: float
    target_agreement: float
    questions: int
    alpha: float | None = None
    agreement_bound: float | None = None
    confidence: float | None = None
    asked: str = ""
    made_on: CorpusState | None = None

    def resolved(self) -> Selector:
        """Return the selector with its scale; raises :class:`.ConfigError` if there is none of that name or scale."""
        selector = resolve_selector(self.selector)
        if self.alpha is None:
            return selector
        if not isinstance(selector, CacheCraft):
            raise ConfigError(f"alpha={self.alpha!r} of a calibration is cache_craft's, not {self.selector!r}'s")
        return replace(selector, alpha=self.alpha)

    def to_json(self) -> str:
        """Return the file's content."""
        return json.dumps(asdict(self), indent=1)

    def save(self, kv_dir: Path) -> Path:
        """Keep it for ``recompute_ratio="auto"``, and return where."""
        path = calibration_path(kv_dir, self.identity)
        write_atomically(path, self.to_json().encode())
        return path


def calibration_path(kv_dir: Path, identity: str) -> Path:
    """Return where the calibration of an identity is kept."""
    return kv_dir / f"calibration-{identity[:16]}.json"


def read_calibration(kv_dir: Path, identity: str) -> Calibration:
    """Read the calibration of an identity.

    Raises
    ------
    ConfigError
        If there is none, or the file cannot be understood.
    """
    path = calibration_path(kv_dir, identity)
    advice = f"run: fused-kv calibrate --kv-dir {kv_dir}, or give recompute_ratio a number"
    try:
        parsed: Any = json.loads(path.read_bytes())
        made_on = parsed.pop("made_on", None)
        found = Calibration(**parsed, made_on=None if made_on is None else CorpusState(**made_on))
        valid = found.identity == identity and 0.0 <= found.recompute_ratio <= 1.0 and isinstance(found.selector, str)
        valid = valid and (found.alpha is None or found.alpha > 0.0)
    except FileNotFoundError as error:
        raise ConfigError(
            f"recompute_ratio='auto' needs a calibration of this model on this store, but there is none: {advice}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"The calibration {path} cannot be read ({error}): {advice}") from error
    if not valid:
        raise ConfigError(f"The calibration {path} is of another model or damaged: {advice}")
    return found
