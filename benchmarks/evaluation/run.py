"""What is missing of a set's measurements: store its chunks, ask its questions, keep the records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import LoadedModel
from fused_kv_llm.report import IngestReport

from .asked_chunks import preprocess_asked
from .measure import measure
from .methods import FULL, Method
from .questions import Question
from .records import RecordFile
from .rules import rule_of
from .setting import Setting

__all__ = ["Bench", "missing", "open_bench"]


@dataclass(frozen=True, slots=True)
class Bench:
    """One model, its store, and an engine for each preprocessing.

    Parameters
    ----------
    engines : dict of str to FusedKVEngine
        By preprocessing, "none" among them; they share one model.
    kv_dir : Path
        Of all of them.
    """

    engines: dict[str, FusedKVEngine]
    kv_dir: Path

    @property
    def engine(self) -> FusedKVEngine:
        """The one without preprocessing."""
        return self.engines["none"]

    def ingest(
        self, path: Path, questions: Sequence[Question], setting: Setting, selectors: Sequence[str]
    ) -> dict[str, IngestReport]:
        """Store the KV of the corpus, and what the selectors read beside that of its chunks; processes take turns.

        Returns
        -------
        dict of str to IngestReport
            By preprocessing. "none" comes first and writes the KV that the others add to.
        """
        used = list(dict.fromkeys(text for question in questions for text in question.passages))
        reports = {}
        corpus = setting.corpus_texts(path, used, self.engine)
        with FileLock(self.kv_dir / "quality.lock"):
            for name, engine in self.engines.items():
                if setting.corpus == "asked" and name != "none":
                    whole = replace(setting, corpus="all").corpus_texts(path, used, self.engine)
                    preprocess_asked(engine, whole, corpus)
                reports[name] = engine.build_kv_cache(
                    corpus, preprocess="later" if setting.corpus == "asked" else "wait"
                )
                print(f"{path.stem}, {name}: {reports[name].summary()}")
                for selector in selectors:
                    engine.build_anchors(used, selector=rule_of(selector))
        return reports

    def measure(
        self,
        questions: Sequence[Question],
        methods: Sequence[Method],
        setting: Setting,
        out: RecordFile,
        until_s: float = float("inf"),
    ) -> None:
        """Append the records that are not there yet; the questions' chunks are stored.

        Parameters
        ----------
        questions, methods, setting
        out : RecordFile
        until_s : float
            ``time.perf_counter()`` after which no further question is begun.
        """
        for question, todo in track(missing(out, questions, methods), description=out.digest):
            if time.perf_counter() > until_s:
                return
            measured = measure(self.engines, question, [method for method in todo if method != FULL], setting)
            out.append(question.id, {method.key: record for method, record in measured.items()})


def missing(
    out: RecordFile, questions: Sequence[Question], methods: Sequence[Method]
) -> list[tuple[Question, list[Method]]]:
    """Return the questions that have not been asked by all methods, and by which not."""
    records = out.read()
    by_question = [(q, [m for m in (FULL, *methods) if (q.id, m.key) not in records]) for q in questions]
    return [(question, todo) for question, todo in by_question if todo]


def open_bench(
    stack: ExitStack, loaded: LoadedModel, kv_dir: Path, preprocessings: Sequence[str], **options: Any
) -> Bench:
    """Return a bench whose engines, with further options of theirs, are closed with the stack."""
    kv_dir.mkdir(parents=True, exist_ok=True)
    engines = {
        name: stack.enter_context(
            FusedKVEngine(loaded, kv_dir=kv_dir, store_misses=False, preprocessing=name, **options)
        )
        for name in dict.fromkeys(["none", *preprocessings])
    }
    return Bench(engines, kv_dir)
